#!/usr/bin/env bash
# Checks a slice: all hosts meet, see the devices they should, and compute and communicate at a plausible speed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TEXT
Usage: health.sh NAME [--type TYPE] [options]

Runs health.py on all workers, with what the table of slices says about the type. Prints its table; the JSON of each host
is in runs/tpu/NAME/health-.../worker-N.log. Needs sync.sh and install.sh before, and no other run.

  --type TYPE         accelerator type (default: asked from the queued resource)
  --time-limit S      whole seconds for the hosts to meet, and for each check (default 120)
  --poll-seconds S    time between two looks (default 5)
$WORKER_OPTIONS
$COMMON_OPTIONS
TEXT
}
TYPE="" LIMIT=120 POLL=5 FORWARDED=()
own_option() {
  case $1 in
    --type) take_value "$@"; TYPE="$VALUE" ;;
    --time-limit) take_value "$@"; check_number "$1" "$VALUE"; LIMIT="$VALUE" ;;
    --poll-seconds) take_value "$@"; check_seconds "$1" "$VALUE"; POLL="$VALUE" ;;
    *)
      worker_option "$@" || return
      FORWARDED+=("${@:1:TAKEN}")
      ;;
  esac
}
parse_options "$@"
((!HAS_COMMAND)) || usage_error "unexpected '--'"
check_name
check_place
need_gcloud

FORWARDED+=(--zone "$ZONE")
[[ -z $PROJECT ]] || FORWARDED+=(--project "$PROJECT")
((!DRY_RUN)) || FORWARDED+=(--dry-run)
if [[ -z $TYPE ]]; then
  ((!DRY_RUN)) || usage_error "a dry run needs --type"
  answer="$(queued_resource)" || die "can't ask for '$NAME'" "$EXIT_UNREACHABLE"
  read -r state TYPE <<<"$answer"
  [[ $state == ACTIVE ]] || die "'$NAME' is $state, expected ACTIVE" "$EXIT_UNREACHABLE"
fi
answer="$(topology "$TYPE" hosts devices hbm_gib peak_tflops)" || exit "$EXIT_USAGE"
read -r hosts devices memory peak <<<"$answer"
[[ -z $SCRATCH ]] || cleanup
exec bash "$TPU_SETUP/run.sh" "$NAME" --hosts "$hosts" "${FORWARDED[@]}" --run-id "health-$(date -u +%Y%m%d-%H%M%S)" \
  --poll-seconds "$POLL" -- python tpu_setup/health.py --time-limit "$LIMIT" --expect-hosts "$hosts" \
  --expect-devices "$devices" --expect-memory-gib "$memory" --peak-tflops "$peak"

#!/usr/bin/env bash
# Deletes a queued resource and its node. Does nothing when there is none.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TEXT
Usage: delete.sh NAME [options]

Deletes the queued resource NAME and its node with everything on its disks, whatever state they are in. If there is none:
says so and exits with 0.

$COMMON_OPTIONS
TEXT
}
parse_options "$@"
((!HAS_COMMAND)) || usage_error "unexpected '--'"
check_name
check_place
need_gcloud

command=(gcloud compute tpus queued-resources delete "$NAME" --force "${WHERE[@]}")
if ((DRY_RUN)); then
  queued_resource
  note "if there is one:"
  quote "${command[@]}"
  exit 0
fi
make_scratch
answer="$(queued_resource)" || die "can't ask for '$NAME'"
if [[ $answer == ABSENT* ]]; then
  echo "$NAME: there is none in $ZONE"
  exit 0
fi
if ! "${command[@]}"; then
  answer="$(queued_resource)" || die "can't ask for '$NAME'"
  [[ $answer == ABSENT* ]] || die "'$NAME' was not deleted, it is ${answer% *}"
fi
echo "$NAME: deleted"

#!/usr/bin/env bash
# Shows the logs of a run, of one worker or of all.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TEXT
Usage: logs.sh NAME [--worker N | --worker all] [--follow] [options]

Shows the end of a run's log as the workers have it. run.sh keeps copies in runs/tpu/NAME/RUN_ID.

  --worker N|all      one worker or all (default 0)
  --run-id ID         this run (default: the latest)
  --lines N           how many lines (default 50)
  --follow            go on until interrupted
$WORKER_OPTIONS
$COMMON_OPTIONS
TEXT
}
WORKER=0 RUN_ID=latest LINES_SHOWN=50 FOLLOW=end
own_option() {
  case $1 in
    --worker) take_value "$@"; check "$VALUE" 'all|[0-9]{1,5}' "$1" "a worker's number or all"; WORKER="$VALUE" ;;
    --run-id) take_value "$@"; check_run_id "$VALUE"; RUN_ID="$VALUE" ;;
    --lines) take_value "$@"; check_number "$1" "$VALUE"; LINES_SHOWN="$VALUE" ;;
    --follow) FOLLOW=follow ;;
    *) worker_option "$@" ;;
  esac
}
parse_options "$@"
((!HAS_COMMAND)) || usage_error "unexpected '--'"
check_name
check_place
need_gcloud

if [[ $WORKER == all ]]; then
  find_workers
  warm_up
else
  HOSTS=1 WORKERS=("$WORKER")
fi
command="bash $REMOTE_WORKER tail_log $RUN_ID $LINES_SHOWN $FOLLOW"
labelled() { # worker: its log, each line with its number
  ssh_worker "$1" "$command" > >(sed -u "s/^/[$1] /")
}

if [[ $FOLLOW == follow ]]; then
  SSH_TIMEOUT=0 SSH_ATTEMPTS=1000000 PARALLEL="${#WORKERS[@]}"
  if ((DRY_RUN)); then
    for worker in "${WORKERS[@]}"; do ssh_worker "$worker" "$command"; done
    exit 0
  fi
  make_scratch
  for worker in "${WORKERS[@]}"; do labelled "$worker" & done
  wait
else
  all_workers logs "reading the logs" ssh_worker "$command"
  ((!DRY_RUN)) || exit 0
  for worker in "${WORKERS[@]}"; do
    if [[ $WORKER == all ]]; then sed "s/^/[$worker] /" "$SCRATCH/logs.$worker.out"; else cat "$SCRATCH/logs.$worker.out"; fi
  done
fi

#!/usr/bin/env bash
# Ends a run on all workers of a slice.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TEXT
Usage: kill.sh NAME [--run-id ID] [options]

Ends the run on all workers: SIGTERM to its process group and to nothing else, SIGKILL after --grace seconds. Then removes
/tmp/libtpu_lockfile where no process has the TPU open.

  --run-id ID         this run (default: the active one)
  --grace S           whole seconds between SIGTERM and SIGKILL (default 15)
$WORKER_OPTIONS
$COMMON_OPTIONS
TEXT
}
RUN_ID=active GRACE=15
own_option() {
  case $1 in
    --run-id) take_value "$@"; check_run_id "$VALUE"; RUN_ID="$VALUE" ;;
    --grace) take_value "$@"; check_number "$1" "$VALUE"; GRACE="$VALUE" ;;
    *) worker_option "$@" ;;
  esac
}
parse_options "$@"
((!HAS_COMMAND)) || usage_error "unexpected '--'"
check_name
check_place
need_gcloud
find_workers
warm_up
all_workers kill "ending the run" ssh_worker "bash $REMOTE_WORKER kill_run $RUN_ID $GRACE"
((DRY_RUN)) || for worker in "${WORKERS[@]}"; do sed "s/^/worker $worker: /" "$SCRATCH/kill.$worker.out"; done

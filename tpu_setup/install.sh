#!/usr/bin/env bash
# Installs Python and the locked packages on all workers of a slice.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
SSH_TIMEOUT=1800

usage() {
  cat <<TEXT
Usage: install.sh NAME [options]

On all workers: uv, a Python of its own (the images' is too old), the packages of tpu_setup/requirements-tpu.txt as the
synced commit has it (run sync.sh first), and a check that they import. What is there already is left as it is.

$WORKER_OPTIONS
$COMMON_OPTIONS
TEXT
}
own_option() { worker_option "$@"; }
parse_options "$@"
((!HAS_COMMAND)) || usage_error "unexpected '--'"
check_name
check_place
need_gcloud
find_workers
warm_up
all_workers install "installing" ssh_worker "bash $REMOTE_WORKER install"
((DRY_RUN)) || tail -n 1 "$SCRATCH/install.0.out"
((DRY_RUN)) || echo "installed on all ${#WORKERS[@]} workers"

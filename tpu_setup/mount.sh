#!/usr/bin/env bash
# Mounts a shared folder on all workers of a slice.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
SSH_TIMEOUT=900

usage() {
  cat <<TEXT
Usage: mount.sh NAME (--bucket BUCKET | --nfs HOST:/PATH | --unmount) [options]

Mounts a Cloud Storage bucket (gcsfuse, installed where missing) or an NFS export on all workers, for checkpoints and the
compilation cache. What is mounted already stays; something else in its place is an error. Buckets should have a
hierarchical namespace: in others renaming a folder, which finishes a checkpoint, is slow and not atomic.

  --folder DIR        where (default /mnt/jaxtool, which env.sh looks for)
$WORKER_OPTIONS
$COMMON_OPTIONS
TEXT
}
KIND="" SOURCE="" FOLDER=/mnt/jaxtool
one_kind() { [[ -z $KIND ]] || usage_error "--bucket, --nfs and --unmount exclude each other"; }
own_option() {
  case $1 in
    --bucket)
      one_kind
      take_value "$@"
      check "$VALUE" '[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]' "$1" "a bucket's name without gs://"
      KIND=gcs SOURCE="$VALUE"
      ;;
    --nfs)
      one_kind
      take_value "$@"
      check "$VALUE" '[A-Za-z0-9.-]{1,253}:/[A-Za-z0-9._/-]{0,500}' "$1" 'HOST:/PATH'
      KIND=nfs SOURCE="$VALUE"
      ;;
    --unmount) one_kind; KIND=unmount ;;
    --folder)
      take_value "$@"
      check "$VALUE" '/[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*' "$1" 'an absolute path'
      FOLDER="$VALUE"
      ;;
    *) worker_option "$@" ;;
  esac
}
parse_options "$@"
((!HAS_COMMAND)) || usage_error "unexpected '--'"
check_name
check_place
[[ -n $KIND ]] || usage_error "what should be mounted? give --bucket or --nfs"
need_gcloud
find_workers
warm_up
if [[ $KIND == unmount ]]; then
  all_workers mount "unmounting" ssh_worker "bash $REMOTE_WORKER unmount_shared $FOLDER"
else
  all_workers mount "mounting" ssh_worker "bash $REMOTE_WORKER mount_shared $KIND $SOURCE $FOLDER"
fi
((DRY_RUN)) || for worker in "${WORKERS[@]}"; do sed "s/^/worker $worker: /" "$SCRATCH/mount.$worker.out"; done

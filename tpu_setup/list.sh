#!/usr/bin/env bash
# Lists the queued resources of a zone.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TEXT
Usage: list.sh [options]

Lists the queued resources of a zone with their states. Those that are SUSPENDED or FAILED still count against the quota
until they are deleted.

$COMMON_OPTIONS
TEXT
}
parse_options "$@"
((!HAS_COMMAND)) || usage_error "unexpected '--'"
[[ -z $NAME ]] || usage_error "unexpected argument '$NAME'"
check_place
need_gcloud
execute gcloud compute tpus queued-resources list "${WHERE[@]}"

#!/usr/bin/env bash
# Requests a TPU slice as a queued resource. Does nothing when it exists already.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TEXT
Usage: create.sh NAME --type TYPE [--spot | --reserved | --on-demand] [options]

Requests the TPU slice NAME as a queued resource with one node of the same name. If it exists: says so and exits with 0,
or with 1 when it is of another type or has failed (delete.sh it first).

  --type TYPE         accelerator type, for example v5litepod-16 (topology.py --table lists them)
  --spot              cheap, can be preempted at any time
  --reserved          from a reservation of the project
  --on-demand         neither (default)
  --runtime-version V image of the machines (default: the one for the type)
  --valid-until-duration D  give the request up after this time, for example 6h
  --network N, --subnetwork N, --service-account EMAIL, --labels K=V,..., --internal-ips
                      handed to gcloud
  --wait              wait until it is ACTIVE
  --poll-seconds S    time between two looks while waiting (default 30)
$COMMON_OPTIONS
TEXT
}

TYPE="" TIER="" RUNTIME="" WAIT=0 POLL=30 MORE=()
own_option() {
  case $1 in
    --spot | --reserved | --on-demand)
      [[ -z $TIER || $TIER == "$1" ]] || usage_error "$TIER and $1 exclude each other"
      TIER="$1"
      return
      ;;
    --internal-ips) MORE+=("$1"); return ;;
    --wait) WAIT=1; return ;;
    --type | --runtime-version | --valid-until-duration | --network | --subnetwork | --service-account | --labels | \
      --poll-seconds) take_value "$@" ;;
    *) return 1 ;;
  esac
  case $1 in
    --type) TYPE="$VALUE" ;;
    --runtime-version)
      check "$VALUE" '[a-z0-9][a-z0-9._-]{0,62}' "$1" 'one such as tpu-ubuntu2204-base'
      RUNTIME="$VALUE"
      ;;
    --poll-seconds) check_seconds "$1" "$VALUE"; POLL="$VALUE" ;;
    *)
      case $1 in
        --valid-until-duration) check "$VALUE" '[1-9][0-9]{0,6}[smhd]' "$1" 'a duration such as 6h' ;;
        --network | --subnetwork) check "$VALUE" '[a-z0-9][a-z0-9./-]{0,200}' "$1" 'a name' ;;
        --service-account) check "$VALUE" '[a-z0-9-]+@[a-z0-9.-]+' "$1" 'an e-mail address' ;;
        --labels)
          check "$VALUE" '[a-z][a-z0-9_-]*=[a-z0-9_-]*(,[a-z][a-z0-9_-]*=[a-z0-9_-]*)*' "$1" 'key=value,...'
          ;;
      esac
      MORE+=("$1=$VALUE")
      ;;
  esac
}
parse_options "$@"
((!HAS_COMMAND)) || usage_error "unexpected '--'"
check_name
check_place
[[ -n $TYPE ]] || usage_error "no accelerator type: give --type"
image="$(topology "$TYPE" runtime_version)" || exit "$EXIT_USAGE"
[[ $image != - ]] || usage_error "$TYPE is offered by GKE only: see tpu_setup/jobset.yaml"
need_gcloud

[[ -n $TIER && $TIER != --on-demand ]] && MORE=("$TIER" "${MORE[@]}")
request=(gcloud compute tpus queued-resources create "$NAME" "--node-id=$NAME" "--accelerator-type=$TYPE"
  "--runtime-version=${RUNTIME:-$image}" "${MORE[@]}" --async "${WHERE[@]}")
if ((DRY_RUN)); then
  queued_resource
  note "if there is none:"
  quote "${request[@]}"
  ((!WAIT)) || note "then the first command again, every $POLL s, until it is ACTIVE"
  exit 0
fi

look() { # STATE and FOUND (the type)
  local answer
  answer="$(queued_resource)" || die "can't ask for '$NAME'"
  read -r STATE FOUND <<<"$answer"
}
make_scratch
look
if [[ $STATE == ABSENT ]]; then
  "${request[@]}" || die "the request for '$NAME' failed"
  echo "$NAME: requested $TYPE in $ZONE"
  look
elif [[ $FOUND != "$TYPE" && $FOUND != - ]]; then
  die "'$NAME' exists and is a $FOUND, not a $TYPE"
else
  echo "$NAME: exists already"
fi

((!WAIT)) || trap 'echo "$NAME: the request stays in the queue; delete.sh withdraws it"; exit 130' INT
said=""
while true; do
  [[ $STATE == "$said" ]] || echo "$NAME: $STATE"
  said="$STATE"
  case $STATE in
    ACTIVE) exit 0 ;;
    FAILED | SUSPENDED | SUSPENDING | DELETING)
      gcloud compute tpus queued-resources describe "$NAME" "--format=yaml(state)" "${WHERE[@]}" >&2 || true
      die "'$NAME' is $STATE: delete.sh it, then create it again"
      ;;
  esac
  ((WAIT)) || exit 0
  pause "$POLL"
  look
done

# shellcheck shell=bash
# What the scripts of this folder share: options, validation, dry runs, and ssh to all workers with one log and one exit
# code each. Sourced, never run. A script defines usage() and, for options of its own, own_option().

# Exit codes, the same in all scripts (worker.sh has them too).
export EXIT_FAILED=1 EXIT_USAGE=2 EXIT_UNREACHABLE=3 EXIT_BUSY=4

TPU_SETUP="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export TPU_SETUP
# On the workers, relative to the home directory that ssh starts in.
export REMOTE_WORKER="jaxtool-tpu/code/tpu_setup/worker.sh"

SCRIPT="$(basename "$0")"
DRY_RUN=0 NAME="" TAKEN=1 VALUE=""
export HAS_COMMAND=0 COMMAND=() # what follows "--"
PROJECT="${TPU_PROJECT:-}" ZONE="${TPU_ZONE:-}"
HOSTS="" WORKERS=() PARALLEL=32 SSH_TIMEOUT=180 SSH_ATTEMPTS=3 SSH_DELAY=10
GCLOUD=(gcloud) WHERE=() SSH_FLAGS=()
CODES=() SCRATCH=""

die() { # message [exit code]
  printf '%s: %s\n' "$SCRIPT" "$1" >&2
  exit "${2:-$EXIT_FAILED}"
}

usage_error() {
  printf "%s: %s\n'%s --help' lists the options.\n" "$SCRIPT" "$1" "$SCRIPT" >&2
  exit "$EXIT_USAGE"
}

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || die "needs bash 4.4 or later, this is $BASH_VERSION"

COMMON_OPTIONS="  --zone ZONE         Google Cloud zone (default: \$TPU_ZONE)
  --project PROJECT   Google Cloud project (default: \$TPU_PROJECT, else gcloud's own)
  --dry-run           print the commands instead of running them
  -h, --help          this text"
WORKER_OPTIONS="  --hosts N           number of workers (default: the node is asked; in a dry run 1)
  --parallel N        ssh connections at the same time (default $PARALLEL)
  --ssh-timeout S     seconds for one ssh or scp call (default $SSH_TIMEOUT)
  --ssh-attempts N    attempts for a call that fails or hangs (default $SSH_ATTEMPTS)
  --ssh-delay S       seconds between attempts (default $SSH_DELAY)
  --ssh-key-file F    private key (default: gcloud's)
  --internal-ip       connect to internal addresses
  --iap               tunnel through Identity-Aware Proxy (gcloud alpha)"
export COMMON_OPTIONS WORKER_OPTIONS

# ---------------------------------------------------------------------------------------------------------------------
# Quoting and running
# ---------------------------------------------------------------------------------------------------------------------

quote() { # prints words as one line that a shell reads back as the same words
  local word line=()
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_./:@%+,-][A-Za-z0-9_./:@%+,=-]*$ ]]; then
      line+=("$word")
    else
      line+=("'${word//\'/\'\\\'\'}'")
    fi
  done
  printf '%s\n' "${line[*]}"
}

execute() { # runs a command, or prints it in a dry run
  if ((DRY_RUN)); then quote "$@"; else "$@"; fi
}

note() { # a remark: a comment in a dry run, so that its output stays a script
  if ((DRY_RUN)); then printf '# %s\n' "$*"; else printf '%s\n' "$*"; fi
}

pause() { # a sleep that signals end at once
  sleep "$1" &
  wait $!
}

cleanup() {
  local pid
  trap - EXIT
  for pid in $(jobs -p); do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  [[ -z $SCRATCH ]] || rm -rf "$SCRATCH"
}

make_scratch() { # a private folder that goes with the script
  [[ -z $SCRATCH ]] || return 0
  SCRATCH="$(mktemp -d)"
  trap cleanup EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
}

# ---------------------------------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------------------------------

take_value() { # option value: VALUE, or an error where none follows
  [[ $# -ge 2 && $2 != --* ]] || usage_error "$1 needs a value"
  VALUE="$2" TAKEN=2
}

check() { # value regex what: refuses a value that the regular expression doesn't match as a whole
  local whole="^($2)$" newline=$'\n'
  [[ $1 =~ $whole && $1 != *"$newline"* ]] || usage_error "$3 is '$1', expected $4"
}
check_number() { check "$2" '[1-9][0-9]{0,8}' "$1" 'a positive number'; }
check_seconds() { check "$2" '[0-9]{1,8}(\.[0-9]{1,3})?' "$1" 'seconds'; }
check_run_id() { check "$1" '[a-z0-9][a-z0-9._-]{0,62}' 'the run id' 'up to 63 of a-z 0-9 . _ -, the first a letter or digit'; }

own_option() { return 1; }

common_option() {
  case $1 in
    -h | --help) usage; exit 0 ;;
    --dry-run) DRY_RUN=1 TAKEN=1 ;;
    --zone) take_value "$@"; ZONE="$VALUE" ;;
    --project) take_value "$@"; PROJECT="$VALUE" ;;
    -*) return 1 ;;
    *)
      [[ -z $NAME ]] || usage_error "unexpected argument '$1'"
      NAME="$1" TAKEN=1
      ;;
  esac
}

worker_option() {
  case $1 in
    --internal-ip) SSH_FLAGS+=(--internal-ip); return ;;
    --iap) GCLOUD=(gcloud alpha) SSH_FLAGS+=(--tunnel-through-iap); return ;;
    --hosts | --parallel | --ssh-timeout | --ssh-attempts | --ssh-delay | --ssh-key-file) take_value "$@" ;;
    *) return 1 ;;
  esac
  case $1 in
    --hosts) HOSTS="$VALUE"; check_number "$1" "$VALUE" ;;
    --parallel) PARALLEL="$VALUE"; check_number "$1" "$VALUE" ;;
    --ssh-timeout) SSH_TIMEOUT="$VALUE"; check_seconds "$1" "$VALUE" ;;
    --ssh-attempts) SSH_ATTEMPTS="$VALUE"; check_number "$1" "$VALUE" ;;
    --ssh-delay) SSH_DELAY="$VALUE"; check_seconds "$1" "$VALUE" ;;
    --ssh-key-file) SSH_FLAGS+=("--ssh-key-file=$VALUE") ;;
  esac
}

parse_options() {
  local split=()
  while (($#)); do
    case $1 in
      --) shift; HAS_COMMAND=1 COMMAND=("$@"); break ;;
      --*=*) split+=("${1%%=*}" "${1#*=}") ;;
      *) split+=("$1") ;;
    esac
    shift
  done
  set -- "${split[@]}"
  while (($#)); do
    TAKEN=1
    own_option "$@" || common_option "$@" || usage_error "unknown option '$1'"
    shift "$TAKEN"
  done
}

check_place() { # zone and project, which become WHERE
  [[ -n $ZONE ]] || usage_error "no zone: give --zone, or set TPU_ZONE"
  check "$ZONE" '[a-z]+-[a-z]+[0-9]+-[a-z]' 'the zone' 'one such as us-central2-b'
  WHERE=("--zone=$ZONE")
  if [[ -n $PROJECT ]]; then
    check "$PROJECT" '([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]' 'the project' 'a project id'
    WHERE+=("--project=$PROJECT")
  fi
  WHERE+=(--quiet)
}

check_name() {
  [[ -n $NAME ]] || usage_error "no name given"
  check "$NAME" '[a-z]([-a-z0-9]{0,61}[a-z0-9])?' 'the name' 'up to 63 of a-z 0-9 -, a letter first, no - last'
}

need_gcloud() {
  ((DRY_RUN)) || command -v gcloud >/dev/null ||
    die "gcloud is not installed: see https://cloud.google.com/sdk/docs/install, then run 'gcloud init'"
}

topology() { # type field...: from the table of slices
  python3 "$TPU_SETUP/topology.py" "$@"
}

# ---------------------------------------------------------------------------------------------------------------------
# What Google Cloud knows
# ---------------------------------------------------------------------------------------------------------------------

queued_resource() { # prints "STATE TYPE" of the queued resource, or "ABSENT -"; fails when that can't be known
  local describe answer state type status=0
  describe=(gcloud compute tpus queued-resources describe "$NAME"
    "--format=value(state.state,tpu.nodeSpec[0].node.acceleratorType.basename())" "${WHERE[@]}")
  if ((DRY_RUN)); then
    quote "${describe[@]}"
    return
  fi
  make_scratch
  answer="$("${describe[@]}" 2>"$SCRATCH/describe.err")" || status=$?
  if ((status == 0)); then
    read -r state type <<<"$answer"
    printf '%s %s\n' "${state:-STATE_UNSPECIFIED}" "${type:--}"
  elif grep -q NOT_FOUND "$SCRATCH/describe.err"; then
    printf 'ABSENT -\n'
  else
    cat "$SCRATCH/describe.err" >&2
    return 1
  fi
}

find_workers() { # WORKERS: from --hosts, else the node is asked, which must be ready
  local describe answer state i
  describe=(gcloud compute tpus tpu-vm describe "$NAME" "--format=value(state,networkEndpoints.len())" "${WHERE[@]}")
  if [[ -z $HOSTS ]] && ((DRY_RUN)); then
    quote "${describe[@]}"
    note "for each worker; --hosts N shows all of them"
    HOSTS=1
  elif [[ -z $HOSTS ]]; then
    answer="$("${describe[@]}")" || die "can't describe '$NAME' in $ZONE: is it ACTIVE? (list.sh)" "$EXIT_UNREACHABLE"
    read -r state HOSTS <<<"$answer"
    [[ $state == READY ]] || die "'$NAME' is ${state:-in no state}, expected READY" "$EXIT_UNREACHABLE"
    check_number "the node's number of workers" "$HOSTS"
  fi
  WORKERS=()
  for ((i = 0; i < HOSTS; i++)); do WORKERS+=("$i"); done
}

# ---------------------------------------------------------------------------------------------------------------------
# The workers
# ---------------------------------------------------------------------------------------------------------------------

with_limit() { # command: ends it, and what it started, after SSH_TIMEOUT seconds or when this shell is told to end
  local limit child
  limit="$(command -v timeout || command -v gtimeout)" ||
    die "needs the command 'timeout' (macOS: brew install coreutils)"
  "$limit" -k 10 "$SSH_TIMEOUT" "$@" </dev/null &
  child=$!
  # shellcheck disable=SC2064  # the child of now is meant
  trap "kill $child 2>/dev/null; exit 143" TERM
  wait "$child"
}

call_worker() { # worker command: with a time limit, and again where ssh or gcloud failed, not what they ran
  local worker="$1" attempt code
  shift
  if ((DRY_RUN)); then
    quote "$@"
    return
  fi
  for ((attempt = 1; ; attempt++)); do
    code=0
    with_limit "$@" || code=$?
    case $code in
      1 | 124 | 137 | 255) ;; # gcloud itself, the time limit (twice), ssh: worker.sh never ends with these
      *) return "$code" ;;
    esac
    ((attempt < SSH_ATTEMPTS)) || return "$code"
    printf 'worker %s: attempt %s of %s ended with %s, again in %s s\n' \
      "$worker" "$attempt" "$SSH_ATTEMPTS" "$code" "$SSH_DELAY" >&2
    pause "$SSH_DELAY"
  done
}

ssh_worker() { # worker command-line
  call_worker "$1" "${GCLOUD[@]}" compute tpus tpu-vm ssh "$NAME" "--worker=$1" "--command=$2" \
    "${WHERE[@]}" "${SSH_FLAGS[@]}"
}

scp_worker() { # worker file remote-file
  call_worker "$1" "${GCLOUD[@]}" compute tpus tpu-vm scp "$2" "$NAME:$3" "--worker=$1" "${WHERE[@]}" "${SSH_FLAGS[@]}"
}

on_workers() { # label function argument...: function WORKER argument... for all WORKERS, in parallel
  # Output lands in $SCRATCH/LABEL.WORKER.out and .err, exit codes in CODES.
  local label="$1" function="$2" worker
  shift 2
  if ((DRY_RUN)); then
    for worker in "${WORKERS[@]}"; do "$function" "$worker" "$@"; done
    return
  fi
  make_scratch
  for worker in "${WORKERS[@]}"; do
    while (($(jobs -rp | wc -l) >= PARALLEL)); do wait -n || true; done
    (
      code=0
      "$function" "$worker" "$@" >"$SCRATCH/$label.$worker.out" 2>"$SCRATCH/$label.$worker.err" || code=$?
      printf '%s\n' "$code" >"$SCRATCH/$label.$worker.code"
    ) &
  done
  wait
  CODES=()
  for worker in "${WORKERS[@]}"; do CODES[worker]="$(<"$SCRATCH/$label.$worker.code")"; done
}

failed_workers() { # label: prints what the workers that failed said; true when there are any
  local label="$1" worker failed=1
  for worker in "${WORKERS[@]}"; do
    ((CODES[worker])) || continue
    failed=0
    printf 'worker %s: exit code %s\n' "$worker" "${CODES[worker]}"
    tail -n 20 -q "$SCRATCH/$label.$worker.out" "$SCRATCH/$label.$worker.err" | sed 's/^/    /'
  done >&2
  return "$failed"
}

worst_code() { # of CODES: unreachable unless a worker said something more precise
  local worker code=0
  for worker in "${WORKERS[@]}"; do
    case ${CODES[worker]} in
      0) ;;
      "$EXIT_BUSY") code=$EXIT_BUSY; break ;;
      1 | 124 | 137 | 255) ((code)) || code=$EXIT_UNREACHABLE ;;
      *) code=$EXIT_FAILED ;;
    esac
  done
  printf '%s' "$code"
}

all_workers() { # label doing function argument...: on_workers, or the end of the script with the reason
  local label="$1" doing="$2"
  shift 2
  on_workers "$label" "$@"
  ((!DRY_RUN)) || return 0
  if failed_workers "$label"; then die "$doing failed" "$(worst_code)"; fi
}

warm_up() { # the first ssh makes gcloud create the key and publish it; many at once would race
  ((HOSTS > 1)) || return 0
  local all=("${WORKERS[@]}")
  WORKERS=(0)
  all_workers warm "the first ssh connection" ssh_worker true
  WORKERS=("${all[@]}")
}

#!/usr/bin/env bash
# Runs a command on all workers of a slice and brings back their logs and exit codes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TEXT
Usage: run.sh NAME [options] -- COMMAND [ARGUMENT...]

Starts COMMAND in the synced code on every worker, detached from ssh, and follows it: the logs come to
runs/tpu/NAME/RUN_ID/worker-N.log, worker 0's to the terminal as well. When all have ended, prints the exit codes. When one
has failed, the others get --grace seconds more and are ended. Interrupting run.sh leaves the run alone.
The command is started as it stands; for pipes and the like use: -- bash -c '...'

Exit code: 0 all workers ended with 0; 1 one didn't; 3 a worker can't be reached or lost its processes; 4 another run is
active; 2 bad options.

  --run-id ID         name of the run (default: date and time)
  --resume            follow the active run when it runs this very command
  --detach            start, and don't follow
  --show N|all|none   whose log comes to the terminal (default 0)
  --grace S           seconds for the others after a failure (default 60)
  --poll-seconds S    time between two looks (default 20)
  --max-misses N      looks in a row that may fail before a worker counts as unreachable (default 10)
  --logs DIR          where the logs go (default runs/tpu)
$WORKER_OPTIONS
$COMMON_OPTIONS
TEXT
}

RUN_ID="" RESUME=0 DETACH=0 SHOW=0 GRACE=60 POLL=20 MAX_MISSES=10 LOGS="$(dirname "$TPU_SETUP")/runs/tpu"
own_option() {
  case $1 in
    --resume) RESUME=1; return ;;
    --detach) DETACH=1; return ;;
    --run-id | --show | --grace | --poll-seconds | --max-misses | --logs) take_value "$@" ;;
    *) worker_option "$@"; return ;;
  esac
  case $1 in
    --run-id) check_run_id "$VALUE"; RUN_ID="$VALUE" ;;
    --show) check "$VALUE" 'all|none|[0-9]{1,5}' "$1" "a worker's number, all or none"; SHOW="$VALUE" ;;
    --grace) check "$VALUE" '[0-9]{1,8}' "$1" 'whole seconds'; GRACE="$VALUE" ;;
    --poll-seconds) check_seconds "$1" "$VALUE"; POLL="$VALUE" ;;
    --max-misses) check_number "$1" "$VALUE"; MAX_MISSES="$VALUE" ;;
    --logs) LOGS="$VALUE" ;;
  esac
}
parse_options "$@"
check_name
check_place
((HAS_COMMAND && ${#COMMAND[@]})) || usage_error "no command: it comes after --"
RUN_ID="${RUN_ID:-$(date -u +%Y%m%d-%H%M%S)}"
need_gcloud
find_workers
warm_up

# ---------------------------------------------------------------------------------------------------------------------
# Are the workers ready, and the same?
# ---------------------------------------------------------------------------------------------------------------------
command="$(quote "${COMMAND[@]}")"
all_workers preflight "asking the workers" ssh_worker "bash $REMOTE_WORKER preflight $RUN_ID $command"

field() { # worker name: from its preflight
  sed -n "s/^commit=.*/ & /p" "$SCRATCH/preflight.$1.out" | tail -n 1 | sed -n "s/.* $2=\([^ ]*\) .*/\1/p"
}
values() { # name: what the workers say, each value once
  local worker
  for worker in "${WORKERS[@]}"; do field "$worker" "$1"; done | sort -u | paste -sd ' ' -
}
following=0
if ((!DRY_RUN)); then
  if [[ $(values commit) == none ]]; then die "no code on the workers: run sync.sh first"; fi
  if [[ $(values commit) == *' '* ]]; then
    for worker in "${WORKERS[@]}"; do echo "worker $worker: $(field "$worker" commit)"; done >&2
    die "the workers have different code: run sync.sh again"
  fi
  [[ $(values install) == ok ]] || die "packages are $(values install): run install.sh first"
  active="$(values active)"
  if [[ $active != - ]]; then
    if ((RESUME)) && [[ $active != *' '* && $(values same) == yes ]]; then
      following=1 RUN_ID="$active"
      echo "following run $RUN_ID, which is active already"
    else
      die "run '${active/#- /}' is active on '$NAME': wait for it (logs.sh --follow), or end it (kill.sh)" "$EXIT_BUSY"
    fi
  fi
  if ((!following)) && [[ $(values known) != no ]]; then die "run id '$RUN_ID' was used before" "$EXIT_BUSY"; fi
fi

# ---------------------------------------------------------------------------------------------------------------------
# Start
# ---------------------------------------------------------------------------------------------------------------------
start() { # worker
  ssh_worker "$1" "bash $REMOTE_WORKER start $RUN_ID $1 ${#WORKERS[@]} $command"
}
end_all() { # reason
  echo "$1" >&2
  on_workers kill ssh_worker "bash $REMOTE_WORKER kill_run $RUN_ID 15"
  failed_workers kill || true
}
if ((DRY_RUN)); then
  on_workers start start
  ((DETACH)) || note "every $POLL s, until all have ended:"
elif ((!following)); then
  # Until all have started, an interrupt ends those that have.
  make_scratch
  trap 'trap "" INT TERM HUP; for pid in $(jobs -p); do kill "$pid" 2>/dev/null || true; done
    end_all "interrupted while starting: ending run $RUN_ID everywhere"; exit 130' INT TERM HUP
  on_workers start start
  if failed_workers start; then
    code="$(worst_code)"
    end_all "run $RUN_ID did not start everywhere: ending it where it did"
    die "starting failed" "$code"
  fi
  echo "run $RUN_ID started on ${#WORKERS[@]} workers"
fi
if ((DETACH)); then
  note "follow it: logs.sh $NAME --run-id $RUN_ID --follow; end it: kill.sh $NAME --run-id $RUN_ID"
  exit 0
fi

# ---------------------------------------------------------------------------------------------------------------------
# Follow
# ---------------------------------------------------------------------------------------------------------------------
LOGS="$LOGS/$NAME/$RUN_ID"
STATES=() OFFSETS=() MISSES=()
for worker in "${WORKERS[@]}"; do STATES[worker]=running OFFSETS[worker]=0 MISSES[worker]=0; done
look() { # worker
  SSH_ATTEMPTS=1 ssh_worker "$1" "bash $REMOTE_WORKER poll $RUN_ID ${OFFSETS[$1]}"
}
if ((DRY_RUN)); then
  on_workers poll look
  exit 0
fi
make_scratch
trap 'echo "$SCRIPT: run $RUN_ID goes on; follow it: logs.sh $NAME --follow; end it: kill.sh $NAME" >&2; exit 130' INT
trap 'exit 143' TERM HUP
mkdir -p "$LOGS"
printf '%s\n' "$command" >"$LOGS/command"
everyone=("${WORKERS[@]}")
for worker in "${everyone[@]}"; do : >"$LOGS/worker-$worker.log"; done

take() { # worker: its answer, as new log and state
  local answer="$SCRATCH/poll.$1.out" line size
  line="$(tail -n 1 "$answer" | tr -d '\0')"
  if ((CODES[$1])) || [[ $line != '##jaxtool-tpu '* ]]; then
    MISSES[$1]=$((MISSES[$1] + 1))
    if ((MISSES[$1] >= MAX_MISSES)); then
      STATES[$1]=unreachable
      sed "s/^/worker $1: /" "$SCRATCH/poll.$1.err" | tail -n 5 >&2
    fi
    return
  fi
  MISSES[$1]=0
  size=$(($(wc -c <"$answer") - ${#line} - 2))
  head -c "$size" "$answer" >"$answer.log"
  cat "$answer.log" >>"$LOGS/worker-$1.log"
  if [[ $SHOW == "$1" ]]; then cat "$answer.log"; fi
  if [[ $SHOW == all ]]; then sed "s/^/[$1] /" "$answer.log"; fi
  OFFSETS[$1]=$((OFFSETS[$1] + size))
  read -r _ size line <<<"$line"
  ((OFFSETS[$1] < size)) || STATES[$1]="$line" # else more of the log is to come first
}

failed_at="" stopped=""
while true; do
  WORKERS=()
  for worker in "${everyone[@]}"; do [[ ${STATES[worker]} != running ]] || WORKERS+=("$worker"); done
  ((${#WORKERS[@]})) || break
  on_workers poll look
  for worker in "${WORKERS[@]}"; do
    take "$worker"
    if [[ ${STATES[worker]} != running && ${STATES[worker]} != 'exited 0' && -z $failed_at ]]; then
      failed_at=$SECONDS
      echo "worker $worker: ${STATES[worker]}; the others get $GRACE s" >&2
    fi
  done
  if [[ -n $failed_at && -z $stopped ]] && ((SECONDS - failed_at >= GRACE)); then
    WORKERS=()
    for worker in "${everyone[@]}"; do [[ ${STATES[worker]} != running ]] || WORKERS+=("$worker"); done
    stopped=" ${WORKERS[*]} "
    ((!${#WORKERS[@]})) || end_all "ending the run on worker(s)${stopped% }"
    continue
  fi
  ((${#WORKERS[@]})) && pause "$POLL"
done

# ---------------------------------------------------------------------------------------------------------------------
# Fan-in
# ---------------------------------------------------------------------------------------------------------------------
code=0
printf '%-7s %-22s %s\n' worker 'exit code' log >"$LOGS/exit_codes"
for worker in "${everyone[@]}"; do
  state="${STATES[worker]#exited }"
  if [[ $stopped == *" $worker "* ]]; then
    state="$state (ended by run.sh)"
  elif [[ $state == [0-9]* ]]; then
    [[ $state == 0 ]] || code=$EXIT_FAILED
  else
    ((code)) || code=$EXIT_UNREACHABLE
  fi
  printf '%-7s %-22s %s\n' "$worker" "$state" "$LOGS/worker-$worker.log" >>"$LOGS/exit_codes"
done
cat "$LOGS/exit_codes"
exit "$code"

#!/usr/bin/env bash
# The part that runs on each worker, called through ssh by the other scripts: code, Python, runs, locks, mounts.
# Everything lives under ~/jaxtool-tpu: code (a link to the current commit), venv, runs/RUN_ID, output (the runs/ folder
# of the code, kept when the code changes). Needs nothing but this file and what a TPU VM image has.
set -euo pipefail

EXIT_FAILED=10 EXIT_USAGE=2 EXIT_BUSY=4 # never 1 or 255: those mean that gcloud or ssh failed

ROOT="$HOME/jaxtool-tpu"
SELF="$ROOT/code/tpu_setup/worker.sh"
UV_VERSION=0.13.9
PYTHON_VERSION=3.12
LOCKFILE="${JAXTOOL_LIBTPU_LOCKFILE:-/tmp/libtpu_lockfile}"
POLL_BYTES=4194304

die() { # message [exit code]
  printf '%s: %s\n' "$(hostname)" "$1" >&2
  exit "${2:-$EXIT_FAILED}"
}

translate() { # an unforeseen failure's code, where gcloud or ssh could have failed with the same
  case $? in 1 | 124 | 137 | 255) exit "$EXIT_FAILED" ;; esac
}
trap translate EXIT

as_root() {
  if ((EUID == 0)); then "$@"; else sudo -n "$@"; fi
}

# ---------------------------------------------------------------------------------------------------------------------
# Code
# ---------------------------------------------------------------------------------------------------------------------

adopt() { # commit: makes ~/jaxtool-tpu/new-COMMIT, just unpacked, the current code
  local target="code-$1"
  cd "$ROOT"
  if [[ -d $target ]]; then
    rm -rf "new-$1" # the same commit has the same content
  else
    mkdir -p output
    ln -sfn ../output "new-$1/runs"
    printf '%s\n' "$1" >"new-$1/.jaxtool-commit"
    mv "new-$1" "$target"
  fi
  ln -sfn "$target" code.next
  mv -T code.next code
  printf 'code: %s\n' "$1"
}

commit() { cat "$ROOT/code/.jaxtool-commit" 2>/dev/null || echo none; }

# ---------------------------------------------------------------------------------------------------------------------
# Python
# ---------------------------------------------------------------------------------------------------------------------

wanted_install() { # what the marker of a finished installation says
  printf '%s %s\n' "$PYTHON_VERSION" "$(sha256sum <"$ROOT/code/tpu_setup/requirements-tpu.txt" | cut -d ' ' -f 1)"
}

install_state() {
  if [[ ! -e $ROOT/venv/.jaxtool-installed ]]; then
    echo missing
  elif [[ $(<"$ROOT/venv/.jaxtool-installed") == "$(wanted_install)" ]]; then
    echo ok
  else
    echo stale
  fi
}

check_imports() { "$ROOT/venv/bin/python" "$ROOT/code/tpu_setup/check_install.py"; }

install() { # uv, Python, the locked packages; nothing when they are there
  local uv="$ROOT/bin/uv" python="$ROOT/venv/bin/python"
  [[ -d $ROOT/code ]] || die "no code here: run sync.sh first"
  if [[ $(install_state) == ok ]] && check_imports; then
    echo "packages: up to date"
    return
  fi
  [[ -z $(active_run) ]] || die "run '$(active_run)' uses the packages: wait for it, or kill.sh it" "$EXIT_BUSY"
  rm -f "$ROOT/venv/.jaxtool-installed"
  if [[ $("$uv" --version 2>/dev/null) != "uv $UV_VERSION"* ]]; then
    curl -LsSf --retry 3 "https://astral.sh/uv/$UV_VERSION/install.sh" | env UV_UNMANAGED_INSTALL="$ROOT/bin" sh
  fi
  if [[ $("$python" --version 2>/dev/null) != "Python $PYTHON_VERSION."* ]]; then
    "$uv" venv --clear --python "$PYTHON_VERSION" "$ROOT/venv"
  fi
  "$uv" pip sync --python "$python" "$ROOT/code/tpu_setup/requirements-tpu.txt"
  check_imports
  wanted_install >"$ROOT/venv/.jaxtool-installed"
  echo "packages: installed"
}

# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------

start_time() { # pid: when the kernel started it; tells a process from a later one with the same number
  local line fields
  line="$(cat "/proc/$1/stat" 2>/dev/null)" || return 1
  read -r -a fields <<<"${line##*) }" # the name, in parentheses, may hold anything
  [[ ${fields[0]} != Z ]] || return 1
  printf '%s' "${fields[19]}"
}

run_alive() { # run: true while its process group lives
  local pid started now
  read -r pid started 2>/dev/null <"$ROOT/runs/$1/pid" || return 1
  if now="$(start_time "$pid")"; then
    [[ $now == "$started" ]]
  else
    # The leader is gone; its group's number can't be given away while members live.
    pgrep -g "$pid" -r D,R,S,T,t >/dev/null
  fi
}

run_state() { # run: running, "exited CODE", lost (ended without leaving a code: killed, or the machine restarted), absent
  if [[ ! -d $ROOT/runs/$1 ]]; then
    echo absent
  elif [[ -e $ROOT/runs/$1/exit ]]; then
    echo "exited $(<"$ROOT/runs/$1/exit")"
  elif run_alive "$1"; then
    echo running
  elif [[ -e $ROOT/runs/$1/exit ]]; then # it ended between the two looks
    echo "exited $(<"$ROOT/runs/$1/exit")"
  else
    echo lost
  fi
}

active_run() { # the run whose processes live, or nothing
  local folder
  for folder in "$ROOT"/runs/*/; do
    folder="$(basename "$folder")"
    if run_alive "$folder"; then
      printf '%s' "$folder"
      return
    fi
  done
}

latest_run() {
  # shellcheck disable=SC2012  # run ids have no odd characters
  ls -t "$ROOT/runs" 2>/dev/null | head -n 1
}

digest() { printf '%s\0' "$@" | sha256sum | cut -c 1-16; }

preflight() { # run id, command...: one line of what run.sh wants to know before it starts something
  local run="$1" active
  shift
  active="$(active_run)"
  printf 'commit=%s install=%s active=%s same=%s known=%s\n' "$(commit)" "$(install_state)" "${active:--}" \
    "$([[ -n $active && $(<"$ROOT/runs/$active/digest") == "$(digest "$@")" ]] && echo yes || echo no)" \
    "$([[ -d $ROOT/runs/$run ]] && echo yes || echo no)"
}

start() { # run id, worker, workers, command...
  local run="$1" worker="$2" workers="$3" folder="$ROOT/runs/$1" active tries
  shift 3
  mkdir -p "$ROOT/runs"
  exec 9>"$ROOT/lock"
  flock -w 30 9 || die "another start is going on" "$EXIT_BUSY"
  if [[ -d $folder ]]; then # ssh broke after the start and is tried again
    [[ $(<"$folder/digest") == "$(digest "$@")" ]] || die "run '$run' exists with another command"
    echo "run $run: started already"
    return
  fi
  active="$(active_run)"
  [[ -z $active ]] || die "run '$active' is active: wait for it, or kill.sh it" "$EXIT_BUSY"
  mkdir "$folder"
  digest "$@" >"$folder/digest"
  printf '%q ' "$@" >"$folder/command"
  JAXTOOL_RUN_ID="$run" JAXTOOL_WORKER="$worker" JAXTOOL_WORKERS="$workers" \
    setsid nohup bash "$SELF" lead "$run" "$@" </dev/null >"$folder/log" 2>&1 9>&- &
  for ((tries = 0; tries < 100; tries++)); do
    if [[ -e $folder/pid ]]; then
      echo "run $run: started"
      return
    fi
    sleep 0.1
  done
  die "run '$run' did not start: $(tail -n 3 "$folder/log")"
}

lead() { # run id, command...: the leader of the run's process group, which keeps the exit code
  local folder="$ROOT/runs/$1" code=0
  shift
  printf '%s %s\n' "$$" "$(start_time $$)" >"$folder/pid.next"
  mv "$folder/pid.next" "$folder/pid"
  trap : TERM INT # handled after the command, which gets the signal too, has ended
  # shellcheck source=/dev/null
  source "$ROOT/code/tpu_setup/env.sh"
  cd -P "$ROOT/code"
  env -- "$@" || code=$?
  printf '%s\n' "$code" >"$folder/exit.next"
  mv "$folder/exit.next" "$folder/exit"
}

poll() { # run id, offset: the log from there on, at most POLL_BYTES of it, and a last line with the state
  local state size log="$ROOT/runs/$1/log"
  state="$(run_state "$1")" # before the log: a run that has ended writes no more
  size="$(stat -c %s "$log" 2>/dev/null || echo 0)"
  if ((size > $2)); then
    { tail -c "+$(($2 + 1))" "$log" || true; } | head -c "$((size - $2 < POLL_BYTES ? size - $2 : POLL_BYTES))"
  fi
  printf '\n##jaxtool-tpu %s %s\n' "$size" "$state"
}

tail_log() { # run id (latest: the last one), lines, follow or end
  local run="$1"
  [[ $run != latest ]] || run="$(latest_run)"
  [[ -n $run && -e $ROOT/runs/$run/log ]] || die "there is no run '$1' here"
  if [[ $3 == follow ]]; then
    exec tail -n "$2" -F "$ROOT/runs/$run/log" 2>/dev/null
  fi
  tail -n "$2" "$ROOT/runs/$run/log"
}

kill_run() { # run id (active: the one that runs), seconds until SIGKILL: ends its process group and nothing else
  local run="$1" pid tries
  [[ $run != active ]] || run="$(active_run)"
  if [[ -z $run ]]; then
    echo "no run is active"
  elif ! run_alive "$run"; then
    echo "run $run: not running"
  else
    read -r pid _ <"$ROOT/runs/$run/pid"
    kill -TERM -- "-$pid" 2>/dev/null || true
    for ((tries = 0; tries < $2 * 5; tries++)); do
      run_alive "$run" || break
      sleep 0.2
    done
    if run_alive "$run"; then
      kill -KILL -- "-$pid" 2>/dev/null || true
      for ((tries = 0; tries < 50; tries++)); do
        run_alive "$run" || break
        sleep 0.1
      done
      [[ -e $ROOT/runs/$run/exit ]] || echo 137 >"$ROOT/runs/$run/exit"
      echo "run $run: killed (it ignored SIGTERM for $2 s)"
    else
      echo "run $run: ended"
    fi
  fi
  remove_stale_lock
}

remove_stale_lock() { # libtpu's lock file, which a killed process leaves behind, but only when nobody has the TPU
  local holders
  [[ -e $LOCKFILE ]] || return 0
  if ((EUID != 0)) && ! sudo -n true 2>/dev/null; then
    echo "$LOCKFILE: left alone, whether other users' processes hold it can't be seen without sudo"
    return
  fi
  holders="$(as_root find /proc/[0-9]*/fd -maxdepth 1 \
    \( -lname "$LOCKFILE" -o -lname '/dev/accel*' -o -lname '/dev/vfio/*' \) 2>/dev/null | cut -d / -f 3 | sort -un |
    paste -sd ' ' || true)"
  if [[ -n $holders ]]; then
    echo "$LOCKFILE: held, left alone; processes that have the TPU open: $holders"
  else
    as_root rm -f "$LOCKFILE"
    echo "$LOCKFILE: stale, removed"
  fi
}

# ---------------------------------------------------------------------------------------------------------------------
# Shared folders
# ---------------------------------------------------------------------------------------------------------------------

install_gcsfuse() {
  local list=/etc/apt/sources.list.d/gcsfuse.list key=/usr/share/keyrings/cloud.google.asc
  curl -sSf --retry 3 https://packages.cloud.google.com/apt/doc/apt-key.gpg | as_root tee "$key" >/dev/null
  echo "deb [signed-by=$key] https://packages.cloud.google.com/apt gcsfuse-$(lsb_release -cs) main" |
    as_root tee "$list" >/dev/null
  as_root apt-get -qq update
  as_root apt-get -qq install -y gcsfuse
}

mount_shared() { # gcs bucket folder | nfs host:/path folder
  local mounted probe
  mounted="$(findmnt -n -o SOURCE --mountpoint "$3" || true)"
  if [[ $mounted == "$2" ]]; then
    echo "$3: $2 is mounted already"
    return
  fi
  [[ -z $mounted ]] || die "$3: '$mounted' is mounted there"
  as_root mkdir -p "$3"
  if [[ $1 == gcs ]]; then
    command -v gcsfuse >/dev/null || install_gcsfuse
    as_root chown "$(id -u):$(id -g)" "$3"
    # Checkpoints are finished by renaming their folder, which in buckets without folders of their own needs a limit.
    gcsfuse --implicit-dirs --rename-dir-limit=1000000 "$2" "$3"
  else
    command -v mount.nfs >/dev/null || { as_root apt-get -qq update && as_root apt-get -qq install -y nfs-common; }
    as_root mount -t nfs -o hard,nfsvers=3 "$2" "$3"
  fi
  probe="$3/.jaxtool-$(hostname)-$$" # all workers do this in the same folder
  { touch "$probe" && rm "$probe"; } || die "$3: $2 is mounted, but can't be written to"
  echo "$3: $2 mounted"
}

unmount_shared() { # folder
  if ! findmnt --mountpoint "$1" >/dev/null; then
    echo "$1: nothing is mounted there"
    return
  fi
  as_root umount "$1"
  echo "$1: unmounted"
}

(($#)) || die "expected a verb" "$EXIT_USAGE"
verb="$1"
shift
case $verb in
  adopt | install | preflight | start | lead | poll | kill_run | tail_log | mount_shared | unmount_shared) "$verb" "$@" ;;
  *) die "unknown verb '$verb'" "$EXIT_USAGE" ;;
esac

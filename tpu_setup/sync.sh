#!/usr/bin/env bash
# Sends the code at one commit to all workers of a slice.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TEXT
Usage: sync.sh NAME [--commit REV | --allow-dirty] [options]

Sends the files of one commit (git archive) to all workers and records it there; run.sh refuses to start when the workers
differ. Refuses uncommitted changes, which would not be sent.

  --commit REV        another commit than HEAD; the working tree doesn't matter then
  --allow-dirty       send the changes to tracked files too; says what it leaves out
  --archive-only      make the archive, print its commit, contact nobody
  --repo DIR          the repository (default: the one of this script)
$WORKER_OPTIONS
$COMMON_OPTIONS
TEXT
}

REVISION="" DIRTY=0 ARCHIVE_ONLY=0 REPO="$(dirname "$TPU_SETUP")"
own_option() {
  case $1 in
    --commit) take_value "$@"; REVISION="$VALUE" ;;
    --repo) take_value "$@"; REPO="$VALUE" ;;
    --allow-dirty) DIRTY=1 ;;
    --archive-only) ARCHIVE_ONLY=1 ;;
    *) worker_option "$@" ;;
  esac
}
parse_options "$@"
((!HAS_COMMAND)) || usage_error "unexpected '--'"
[[ -z $REVISION ]] || ((!DIRTY)) || usage_error "--commit and --allow-dirty exclude each other"
if ((!ARCHIVE_ONLY)); then
  check_name
  check_place
  need_gcloud
fi

in_repo() { git -C "$REPO" "$@"; }
in_repo rev-parse --git-dir >/dev/null 2>&1 || die "$REPO is not a git repository"
commit="$(in_repo rev-parse --verify --quiet "${REVISION:-HEAD}^{commit}")" || die "no commit '${REVISION:-HEAD}' in $REPO"
if [[ -z $REVISION ]]; then
  changes="$(in_repo status --porcelain)"
  if [[ -n $changes ]] && ((!DIRTY)); then
    sed -n '1,10s/^/    /p' <<<"$changes" >&2
    die "uncommitted changes ($(wc -l <<<"$changes")): commit them, or --allow-dirty, or --commit HEAD to leave them out"
  elif [[ -n $changes ]]; then
    # An object with the tracked files as they are; neither the tree nor the list of stashes changes.
    stash="$(in_repo -c user.name=jaxtool -c user.email=jaxtool@localhost stash create)"
    commit="${stash:-$commit}"
    untracked="$(sed -n 's/^?? /    /p' <<<"$changes")"
    note "sending uncommitted changes, as commit ${commit:0:12}" >&2
    [[ -z $untracked ]] || printf '%s\n' "untracked files are not sent:" "$untracked" | sed 's/^/# /' >&2
  fi
fi
in_repo cat-file -e "$commit:tpu_setup/worker.sh" 2>/dev/null || die "commit ${commit:0:12} has no tpu_setup/worker.sh"

archive="$REPO/runs/tpu/archives/jaxtool-$commit.tar.gz"
if [[ ! -e $archive ]]; then # named by its content
  execute mkdir -p "$(dirname "$archive")"
  execute git -C "$REPO" archive --format=tar.gz "--output=$archive.part" "$commit"
  execute mv "$archive.part" "$archive"
fi
if ((ARCHIVE_ONLY)); then
  echo "$commit"
  exit 0
fi

send() { # worker
  local file="jaxtool-$commit.tar.gz" new="jaxtool-tpu/new-$commit"
  scp_worker "$1" "$archive" "$file" || return
  ssh_worker "$1" "rm -rf $new && mkdir -p $new && tar -xzf $file -C $new && rm $file && bash $new/tpu_setup/worker.sh adopt $commit"
}
find_workers
warm_up
all_workers sync "sending commit ${commit:0:12}" send
((DRY_RUN)) || echo "commit $commit is on all ${#WORKERS[@]} workers"

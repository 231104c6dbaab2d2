# shellcheck shell=bash
# Environment of a run on TPU or GPU hosts; sourced, also by hand: source tpu_setup/env.sh
# What is set already stays as it is. Nothing here has been measured; unset what hurts.

# The folder behind the link: a program that imports late shall not get another commit's modules.
_jaxtool_code="$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$_jaxtool_code${PYTHONPATH:+:$PYTHONPATH}"
if [[ -d $HOME/jaxtool-tpu/venv/bin ]]; then
  export PATH="$HOME/jaxtool-tpu/venv/bin:$PATH"
fi
export PYTHONUNBUFFERED=1 # logs are read while the program runs

# JAX's own choice has changed between releases (8476, 8482); firewalls want to know.
export JAX_COORDINATOR_PORT="${JAX_COORDINATOR_PORT:-8476}"

# Shared by all hosts where a shared folder is mounted (mount.sh): one host compiles, all load.
JAXTOOL_SHARED="${JAXTOOL_SHARED:-/mnt/jaxtool}"
if [[ -z ${JAX_COMPILATION_CACHE_DIR:-} ]]; then
  if findmnt --mountpoint "$JAXTOOL_SHARED" >/dev/null 2>&1; then
    export JAX_COMPILATION_CACHE_DIR="$JAXTOOL_SHARED/jax-cache"
  else
    export JAX_COMPILATION_CACHE_DIR="$HOME/.cache/jaxtool/jax-cache"
  fi
fi
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-1}"

# GKE sets TPU_ACCELERATOR_TYPE; on a TPU VM the metadata server knows.
if [[ -z ${TPU_ACCELERATOR_TYPE:-} && -z ${TPU_SKIP_MDS_QUERY:-} ]] &&
  { compgen -G '/dev/accel*' || compgen -G '/dev/vfio/[0-9]*'; } >/dev/null; then
  TPU_ACCELERATOR_TYPE="$(curl -sf -m 5 -H 'Metadata-Flavor: Google' \
    "http://${GCE_METADATA_IP:-metadata.google.internal}/computeMetadata/v1/instance/attributes/accelerator-type" || true)"
  export TPU_ACCELERATOR_TYPE
fi

# libtpu refuses to start with a flag it doesn't know; these are known to 0.0.42 and 0.0.50.
if [[ -z ${LIBTPU_INIT_ARGS:-} ]]; then
  _jaxtool_async="--xla_tpu_enable_async_collective_fusion=true \
--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true \
--xla_tpu_enable_async_collective_fusion_multiple_steps=true \
--xla_tpu_overlap_compute_collective_tc=true --xla_enable_async_all_gather=true"
  case ${TPU_ACCELERATOR_TYPE:-} in
    v4-* | v5litepod-* | v5p-*) export LIBTPU_INIT_ARGS="$_jaxtool_async" ;;
    v6e-*) export LIBTPU_INIT_ARGS="$_jaxtool_async --xla_tpu_scoped_vmem_limit_kib=98304" ;; # larger kernel tiles
  esac
fi

ulimit -Sn "$(ulimit -Hn)" # checkpoints and data sets open many files
unset _jaxtool_code _jaxtool_async

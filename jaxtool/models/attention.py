"""The one attention function of all ports, and which implementation a run uses.

Projections and rotary embedding are the networks' own. Implementations are in `xla_attention` (the reference),
`splash_attention` (TPU) and `cudnn_attention` (NVIDIA GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

from jaxtool.models.cudnn_attention import CUDNN_DTYPES, cudnn_attention
from jaxtool.models.splash_attention import splash_attention
from jaxtool.models.xla_attention import xla_attention
from jaxtool.parallel import AxisRules

Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, AxisRules], jax.Array]

IMPLEMENTATIONS: Mapping[str, Attention] = {
    "xla": xla_attention,
    "cudnn": cudnn_attention,
    "splash": splash_attention,
}


def attention(
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    segment_ids_bs: jax.Array,
    rules: AxisRules,
    implementation: str = "xla",
) -> jax.Array:
    """Causal softmax(q k / sqrt(H)) v within segments, [B, S, N, H] in the dtype of the values.

    Args:
        q_bsnh: queries; head n attends with key-value head n // (N / K).
        k_bskh: keys.
        v_bskh: values.
        segment_ids_bs: int32; a token sees those before it and itself in its segment. What comes out at padding (0) is
            finite and depends on the implementation.
        rules: mesh axes of batch and heads.
        implementation: "xla", "cudnn" or "splash"; the latter two run only on their devices.
    """
    return IMPLEMENTATIONS[implementation](q_bsnh, k_bskh, v_bskh, segment_ids_bs, rules)


def resolve_attention(requested: str, *, compute_dtype: str, head_size: int, device: jax.Device) -> tuple[str, str]:
    """The implementation that a run uses on devices like `device`, and a line that says why.

    Args:
        requested: "xla", "cudnn", "splash", or "auto" for the fastest that the device has.
        compute_dtype: dtype of activations.
        head_size: H.
        device: any of the run's devices.

    Raises:
        ValueError: the implementation is unknown, or can't run there.
    """
    if requested not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"attention is {requested!r}, expected one of auto, {', '.join(IMPLEMENTATIONS)}")
    obstacles = {
        "splash": "" if device.platform == "tpu" else f"the devices are {_name(device)}, not TPUs",
        "cudnn": _cudnn_obstacle(compute_dtype, head_size, device),
        "xla": "",
    }
    if requested != "auto":
        if obstacles[requested]:
            raise ValueError(f"attention is {requested!r}, but {obstacles[requested]}; 'auto' takes what there is")
        return requested, f"attention: {requested}, as asked for"
    chosen = next(name for name in ("splash", "cudnn", "xla") if not obstacles[name])
    reason = f"on {_name(device)}"
    if chosen == "xla" and device.platform == "gpu":
        reason = f"because {obstacles['cudnn']}"
    return chosen, f"attention: {chosen}, {reason}"


def _cudnn_obstacle(compute_dtype: str, head_size: int, device: jax.Device) -> str:
    """Why cuDNN can't serve, or nothing; the limits are those that JAX checks."""
    capability = str(getattr(device, "compute_capability", ""))
    major = capability.partition(".")[0]
    if device.platform != "gpu" or not major.isdecimal():  # AMD's are names
        return f"the devices are {_name(device)}, not NVIDIA GPUs"
    if int(major) < 8:
        return f"the devices have compute capability {capability}, below 8.0"
    if compute_dtype not in CUDNN_DTYPES:
        return f"compute_dtype is {compute_dtype}, not {' or '.join(CUDNN_DTYPES)}"
    most = 256 if int(major) >= 9 else 128
    if head_size % 8 or head_size > most:
        return f"the head size is {head_size}, not a multiple of 8 up to {most}"
    return ""


def _name(device: jax.Device) -> str:
    return f"{device.platform} ({device.device_kind})"

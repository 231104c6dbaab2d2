"""Quantised blocks against the formats of ggml, written out number by number in float64, and what is dequantised.

In all of these formats each product fits float32 without rounding, so that the float64 value rounded once is the only
right answer.
"""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxtool.weights import GgufFile, gguf_reader

Q = gguf.GGMLQuantizationType
Decode = Callable[[bytes], list[float]]

# Scales as float16: the largest, the smallest, the largest subnormal, the smallest normal, both zeros, some between.
SCALES = (65504.0, -65504.0, 2.0**-24, -(2.0**-24), 1023 * 2.0**-24, 2.0**-14, 0.0, -0.0, 1.0, 0.0123, -3.7)
ROWS, BLOCKS = 9, 3


def half(block: bytes, offset: int) -> float:
    return struct.unpack_from("<e", block, offset)[0]


def nibbles(quants: Sequence[int]) -> list[int]:
    """All low halves, then all high halves."""
    return [byte & 15 for byte in quants] + [byte >> 4 for byte in quants]


def bit(data: Sequence[int], number: int) -> int:
    return data[number // 8] >> number % 8 & 1


def q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * q for q in struct.unpack_from("<32b", block, 2)]


def q4_0(block: bytes) -> list[float]:
    return [half(block, 0) * (q - 8) for q in nibbles(block[2:])]


def q4_1(block: bytes) -> list[float]:
    return [half(block, 0) * q + half(block, 2) for q in nibbles(block[4:])]


def q5_0(block: bytes) -> list[float]:
    return [half(block, 0) * (q + 16 * bit(block[2:6], i) - 16) for i, q in enumerate(nibbles(block[6:]))]


def q5_1(block: bytes) -> list[float]:
    return [half(block, 0) * (q + 16 * bit(block[4:8], i)) + half(block, 2) for i, q in enumerate(nibbles(block[8:]))]


def six_bit_pairs(packed: bytes) -> list[tuple[int, int]]:
    """Scale and minimum of the eight groups of q4_k and q5_k: the first four whole, the others in two parts."""
    first = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    second = [
        (packed[j + 8] & 15 | packed[j] >> 6 << 4, packed[j + 8] >> 4 | packed[j + 4] >> 6 << 4) for j in range(4)
    ]
    return first + second


def q4_k(block: bytes) -> list[float]:
    pairs, quants = six_bit_pairs(block[4:16]), block[16:]
    numbers = [q for start in range(0, 128, 32) for q in nibbles(quants[start : start + 32])]
    return [half(block, 0) * pairs[i // 32][0] * q - half(block, 2) * pairs[i // 32][1] for i, q in enumerate(numbers)]


def q5_k(block: bytes) -> list[float]:
    pairs, high, quants = six_bit_pairs(block[4:16]), block[16:48], block[48:]
    numbers = [q for start in range(0, 128, 32) for q in nibbles(quants[start : start + 32])]
    numbers = [q + 16 * (high[i % 32] >> i // 32 & 1) for i, q in enumerate(numbers)]
    return [half(block, 0) * pairs[i // 32][0] * q - half(block, 2) * pairs[i // 32][1] for i, q in enumerate(numbers)]


def q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack_from("<16b", block, 192)
    values = []
    for i in range(256):
        part, row, column = i // 128, i % 128 // 32, i % 32
        number = low[64 * part + 32 * (row % 2) + column] >> 4 * (row // 2) & 15
        number += (high[32 * part + column] >> 2 * row & 3) << 4
        values.append(half(block, 208) * scales[i // 16] * (number - 32))
    return values


def q2_k(block: bytes) -> list[float]:
    scales, quants = block[:16], block[16:80]
    values = []
    for i in range(256):
        number = quants[32 * (i // 128) + i % 32] >> 2 * (i % 128 // 32) & 3
        values.append(half(block, 80) * (scales[i // 16] & 15) * number - half(block, 82) * (scales[i // 16] >> 4))
    return values


def q3_k(block: bytes) -> list[float]:
    high, quants, packed = block[:32], block[32:96], block[96:108]
    values = []
    for i in range(256):
        group = i // 16
        scale = (packed[group % 8] >> 4 * (group // 8) & 15) + (packed[8 + group % 4] >> 2 * (group // 4) & 3) * 16 - 32
        number = quants[32 * (i // 128) + i % 32] >> 2 * (i % 128 // 32) & 3
        number -= 0 if high[i % 32] >> i // 32 & 1 else 4
        values.append(half(block, 108) * scale * number)
    return values


# The format, and where its blocks keep numbers in float16.
FORMATS: dict[Q, tuple[Decode, tuple[int, ...]]] = {
    Q.Q8_0: (q8_0, (0,)),
    Q.Q4_0: (q4_0, (0,)),
    Q.Q4_1: (q4_1, (0, 2)),
    Q.Q5_0: (q5_0, (0,)),
    Q.Q5_1: (q5_1, (0, 2)),
    Q.Q2_K: (q2_k, (80, 82)),
    Q.Q3_K: (q3_k, (108,)),
    Q.Q4_K: (q4_k, (0, 2)),
    Q.Q5_K: (q5_k, (0, 2)),
    Q.Q6_K: (q6_k, (208,)),
}


def random_rows(dtype: Q, offsets: Sequence[int]) -> np.ndarray:
    """Rows of blocks with all kinds of scales and random numbers, as bytes."""
    rng = np.random.default_rng(dtype.value)
    size = gguf.GGML_QUANT_SIZES[dtype][1]
    data = rng.integers(0, 256, (ROWS * BLOCKS, size), dtype=np.uint8)
    data[0, :], data[1, :] = 0, 255
    for place, offset in enumerate(offsets):
        scales = np.resize(np.roll(np.array(SCALES, np.float16), 3 * place), len(data))
        data[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return data.reshape(ROWS, BLOCKS * size)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Q]]) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (value, dtype) in tensors.items():
        writer.add_tensor(name, value, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: dtype.name)
def test_blocks(tmp_path: Path, dtype: Q) -> None:
    decode, offsets = FORMATS[dtype]
    data = random_rows(dtype, offsets)
    size = gguf.GGML_QUANT_SIZES[dtype][1]
    exact = [[value for i in range(0, len(row), size) for value in decode(row[i : i + size].tobytes())] for row in data]
    truth = np.array(exact, np.float64).astype(np.float32)
    file = write(tmp_path / "x.gguf", {"a": (data, dtype)})
    rows, columns = file.tensors["a"].shape
    assert (rows, columns) == truth.shape
    assert file.tensors["a"].dtype == dtype.name in file.readable_dtypes
    found = file.read("a", (slice(0, rows), slice(0, columns)))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, truth)
    assert np.abs(truth).max() > 1e5 and (truth != 0).mean() > 0.5
    for index in ((slice(2, 7), slice(37, columns - 3)), (slice(8, 9), slice(0, 1)), (slice(0, 4), slice(32, 64))):
        np.testing.assert_array_equal(file.read("a", index), truth[index])
    assert file.read("a", (slice(3, 3), slice(0, 5))).shape == (0, 5)


def test_plain_types_and_vectors(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    values[0, :4] = [0.0, -0.0, 1e-30, 3e38]
    half_range = values.clip(-6e4, 6e4)
    # bfloat16 is the upper half of float32; these are cut, not rounded.
    upper = (values.view(np.uint32) >> 16).astype(np.uint16)
    file = write(
        tmp_path / "x.gguf",
        {
            "f32": (values, Q.F32),
            "f16": (half_range.astype(np.float16), Q.F16),
            "bf16": (upper.view(np.uint8), Q.BF16),
            "vector": (random_rows(Q.Q8_0, (0,))[2, :68], Q.Q8_0),
        },
    )
    index = (slice(0, 3), slice(1, 30))
    np.testing.assert_array_equal(file.read("f32", index), values[index])
    np.testing.assert_array_equal(file.read("f16", index), half_range.astype(np.float16)[index])
    found = file.read("bf16", index).astype(np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), (upper.astype(np.uint32) << 16)[index])
    row = random_rows(Q.Q8_0, (0,))[2, :68].tobytes()
    truth = np.array(q8_0(row[:34]) + q8_0(row[34:]), np.float32)
    np.testing.assert_array_equal(file.read("vector", (slice(5, 40),)), truth[5:40])


def test_only_what_is_asked_for_a_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns, at_once = 200, 320, 1 << 10
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    file = write(tmp_path / "x.gguf", {"a": (gguf.quants.quantize(values, Q.Q8_0), Q.Q8_0)})
    whole = file.read("a", (slice(0, rows), slice(0, columns)))
    original, sizes = gguf.quants.dequantize, list[int]()

    def dequantise(data: np.ndarray, dtype: Q) -> np.ndarray:
        sizes.append(data.size // 34 * 32)
        return original(data, dtype)

    monkeypatch.setattr(gguf_reader.gguf.quants, "dequantize", dequantise)
    monkeypatch.setattr(gguf_reader, "_AT_ONCE", at_once)
    np.testing.assert_array_equal(file.read("a", (slice(50, 150), slice(70, 190))), whole[50:150, 70:190])
    # Blocks 2 to 5 of 32 numbers hold columns 70 to 189.
    assert sum(sizes) == 100 * 4 * 32
    assert max(sizes) <= at_once
    sizes.clear()
    file.read("a", (slice(0, rows), slice(0, columns)))
    assert sum(sizes) == rows * columns and max(sizes) <= at_once

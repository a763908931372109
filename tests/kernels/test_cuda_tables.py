"""The table of tensors: its cut into blocks, when it is uploaded, what it refuses."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from amp_plugin.kernels.cuda.catalogue import WRITE_TABLE
from amp_plugin.kernels.cuda.compile import SOURCES
from amp_plugin.kernels.cuda.description import (
    ALIKE,
    DENSE,
    DESCRIPTION,
    DTYPE_CODES,
    describe,
    describe_in_python,
    is_dense,
)
from amp_plugin.kernels.cuda.operations import Operations
from amp_plugin.kernels.cuda.tensor_table import (
    FIRST_CHUNK,
    ROW,
    ROWS_BY_VALUE,
    SMALLEST_CHUNK,
    TableCache,
    layout,
)
from tests.cuda_emulation.emulated_kernels import EmulatedDevice, compiler, object_folder

needs_compiler = pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")


@pytest.fixture
def emulated():
    return EmulatedDevice(object_folder())


def half(numel):
    return torch.empty(numel, dtype=torch.float16)  # untouched memory costs nothing


@pytest.mark.parametrize(
    ("numels", "multiprocessors", "chunk"),
    [
        ([1], 132, SMALLEST_CHUNK),
        ([25_000_000 // 161] * 161, 132, FIRST_CHUNK),
        ([2**29], 132, 4 * FIRST_CHUNK),  # 1 GiB: 64 blocks for each multiprocessor
        ([600] * 1000, 132, FIRST_CHUNK),  # one block each is enough
        ([100] * 100_000, 2, FIRST_CHUNK),  # and at least one there must be
    ],
)
def test_the_chunk_gives_every_multiprocessor_work(numels, multiprocessors, chunk):
    base = half(max(numels))
    rows, blocks, found = layout(describe([base[:n] for n in numels]), multiprocessors)
    assert found == chunk
    assert blocks >= min(4 * multiprocessors, sum(-(-2 * n // SMALLEST_CHUNK) for n in numels))
    assert blocks <= max(64 * multiprocessors, 2 * len(numels))
    assert rows["first_block"][0] == 0


def test_more_than_two_to_the_31_elements():
    tensors = [half(3), half(2**32 + 17), half(5)]
    rows, blocks, chunk = layout(describe(tensors), 132)
    assert rows["numel"].tolist() == [3, 2**32 + 17, 5]
    ends = [*rows["first_block"].tolist()[1:], blocks]
    for tensor, first, end in zip(tensors, rows["first_block"].tolist(), ends, strict=True):
        begin = tensor.data_ptr() // 16 * 16
        last = tensor.data_ptr() + 2 * tensor.numel()
        assert begin + (end - first - 1) * chunk < last <= begin + (end - first) * chunk
    rows, blocks, chunk = layout(describe([tensors[1]], [torch.empty(2**32 + 17)]), 132, cast=True)
    assert (blocks - 1) * chunk < 2**32 + 17 <= blocks * chunk


def test_blocks_cover_unaligned_tensors_and_skip_empty_ones():
    buffer = torch.empty(3 * SMALLEST_CHUNK, dtype=torch.float16)
    per_chunk = SMALLEST_CHUNK // 2
    starts_late = buffer[1 : 1 + per_chunk]  # a chunk of elements that spans two chunks of memory
    rows, blocks, chunk = layout(
        describe([buffer[:0], starts_late, buffer[:0], buffer[:1], buffer[:0]]), 10_000
    )
    assert chunk == SMALLEST_CHUNK
    assert rows["first_block"].tolist() == [0, 0, 2, 2, 3]
    assert blocks == 3


def test_rows_are_what_the_sources_say():
    header = (SOURCES / "tensor_table.cuh").read_text()
    assert ROW.itemsize == 32
    assert [name for name in ROW.names if f" {name};" in header] == list(ROW.names)
    codes = (SOURCES / "elements.cuh").read_text().split("enum DType")[1].split("}")[0]
    names = [part.strip(" {k") for part in codes.split("{")[1].split(",")]
    assert [name.lower() for name in names] == [str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES]
    assert f"kRowsByValue = {ROWS_BY_VALUE};" in (SOURCES / "write_table.cu").read_text()
    assert ROWS_BY_VALUE * ROW.itemsize + 16 <= 4096


def test_a_table_is_uploaded_only_when_a_tensor_moved(emulated):
    tables = TableCache(emulated)
    grads = [torch.ones(4), torch.ones(5)]
    first = tables.of(describe(grads))
    assert tables.of(describe(list(grads))) is first
    others = [torch.ones(4), torch.ones(5)]
    assert tables.of(describe(others)) is not first
    assert tables.of(describe(grads)) is first  # two optimizers take turns: nothing is uploaded again
    assert emulated.uploads == 2


@pytest.mark.parametrize("change", ["address", "numel", "dtype", "stream", "cast"])
def test_what_a_table_depends_on(emulated, change):
    tables = TableCache(emulated)
    buffer = torch.ones(16)
    before = tables.of(describe([buffer[:8]]))
    if change == "stream":
        emulated.current_stream = 7
    after = {
        "address": lambda: tables.of(describe([buffer[1:9]])),
        "numel": lambda: tables.of(describe([buffer[:7]])),
        "dtype": lambda: tables.of(describe([buffer.view(torch.bfloat16)[:8]])),
        "stream": lambda: tables.of(describe([buffer[:8]])),
        "cast": lambda: tables.of(describe([buffer[:8]], [buffer[8:]]), cast=True),
    }[change]()
    assert after is not before
    assert not np.shares_memory(after.rows.numpy(), before.rows.numpy())
    assert emulated.uploads == 2


def test_old_tables_are_dropped(emulated):
    tables = TableCache(emulated)
    buffer = torch.ones(500)
    for n in range(1, 200):
        tables.of(describe([buffer[:n]]))
    uploads = emulated.uploads
    tables.of(describe([buffer[:199]]))
    assert emulated.uploads == uploads
    tables.of(describe([buffer[:1]]))
    assert emulated.uploads == uploads + 1


def test_a_table_of_empty_tensors_needs_no_memory(emulated):
    table = TableCache(emulated).of(describe([torch.empty(0)] * 3))
    assert (table.rows, table.count, table.blocks) == (None, 3, 0)


@needs_compiler
def test_a_capture_writes_tables_by_value_and_keeps_none(emulated):
    ops = Operations(emulated)
    grads = [torch.full((n % 5,), 2.0) for n in range(2 * ROWS_BY_VALUE + 1)]
    emulated.in_capture = True
    for _ in range(2):
        emulated.launches.clear()
        norm, found_inf, _ = ops.norm_check(grads, torch.tensor(0.5))
        assert norm.item() == pytest.approx(sum(grad.numel() for grad in grads) ** 0.5)
        assert emulated.launches == [WRITE_TABLE.name] * 3 + ["norm_check", "finalise"]
        assert found_inf.item() == 0
    assert emulated.uploads == 2
    emulated.in_capture = False
    ops.norm_check(grads, torch.tensor(0.5))
    assert emulated.uploads == 3


@needs_compiler
def test_launches(emulated):
    ops = Operations(emulated)
    grads, one = [torch.ones(3) for _ in range(300)], torch.tensor(0.5)
    for call, launches in (
        (lambda: ops.norm_check(grads, one), ["norm_check", "finalise"]),
        (lambda: ops.unscale_(grads, one), ["unscale", "finalise"]),
        (lambda: ops.multiply_(grads, one), ["multiply"]),
        (lambda: ops.cast(grads, [g.half() for g in grads]), ["cast"]),
    ):
        emulated.launches.clear()
        call()
        assert emulated.launches == launches


def test_tensors_of_another_device_are_refused(emulated):
    described = describe([torch.ones(3), torch.ones(3)])
    described["device"][1] += 1
    with pytest.raises(ValueError, match="tensor 1 of 2 is not on cpu, where the scale is; call the op once"):
        TableCache(emulated).of(described)


def test_tensors_off_their_own_alignment_are_refused(emulated):
    odd = torch.frombuffer(bytearray(65), dtype=torch.uint8)[1:].numpy().view(np.float32)
    odd = torch.from_numpy(odd)
    if odd.data_ptr() % 4 == 0:
        pytest.skip("the buffer happens to be aligned")
    with pytest.raises(
        ValueError, match=r"no multiple of its element size of 4 bytes; pass tensor.clone\(\)"
    ):
        TableCache(emulated).of(describe([odd]))


def test_dense_is_one_run_of_memory():
    grid = torch.ones(4, 6, 5)
    assert all(is_dense(one) for one in (grid, grid.permute(2, 0, 1), grid[1:3], grid[:0], torch.tensor(1.0)))
    assert is_dense(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert is_dense(torch.ones(3, 1, 2).transpose(0, 1)[:, 0:1].transpose(0, 1)[0])
    assert not any(is_dense(one) for one in (grid[:, 1:3], grid[..., ::2], torch.ones(3).expand(4, 3)))


ZOO = [
    torch.ones(4, 6, 5),
    torch.ones(4, 6, 5).permute(2, 0, 1),
    torch.ones(4, 6, 5)[:, 1:3],
    torch.ones(3).expand(4, 3),
    torch.empty(0, 3),
    torch.tensor(1.0),
    torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.ones(5, 1, 2)[:, :, 0],
    torch.arange(3),
    *(torch.ones(3, dtype=dtype) for dtype in DTYPE_CODES),
]


def test_python_describes_as_the_native_core_does():
    out = [torch.empty_like(one, dtype=torch.float16) for one in ZOO]
    assert np.array_equal(describe(ZOO), describe_in_python(ZOO))
    assert np.array_equal(describe(ZOO, out), describe_in_python(ZOO, out))
    described = describe(ZOO, out)
    assert described.dtype == DESCRIPTION
    assert [bool(flags & DENSE) for flags in described["flags"]] == [is_dense(one) for one in ZOO]
    assert [bool(flags & ALIKE) for flags in described["flags"]] == [
        one.stride() == other.stride() for one, other in zip(ZOO, out, strict=True)
    ]


@pytest.mark.parametrize("describing", [describe, describe_in_python])
def test_shapes_and_strides_must_be_those_of_the_output(describing):
    six = torch.ones(2, 3)
    for other, flags in (
        (torch.ones(2, 3), DENSE | ALIKE),
        (torch.ones(3, 2), DENSE),
        (torch.ones(3, 2).t(), DENSE),
    ):
        assert describing([six], [other])["flags"].tolist() == [flags]


def test_threads_share_the_cache(emulated):
    tables = TableCache(emulated)
    buffers = [torch.ones(100) for _ in range(8)]
    failures = []

    def work(seed):
        for step in range(200):
            chosen = buffers[(seed + step) % 8]
            table = tables.of(describe([chosen]))
            row = table.rows.numpy().view(ROW)[0]
            if row["address"] != chosen.data_ptr():
                failures.append(step)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures

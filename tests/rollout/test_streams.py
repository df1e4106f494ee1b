"""Random numbers belong to a response: they depend on stream and position, on nothing else."""

import numpy as np
import pytest

from gropius.rollout.streams import philox, stream_key, uniforms


def words(*values):
    return [np.array([value], np.uint64) for value in values]


@pytest.mark.parametrize(
    ("counter", "key", "noise"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, noise):
    assert tuple(int(word[0]) for word in philox(words(*counter), words(*key))) == noise


def test_a_number_depends_on_its_stream_and_position_only():
    keys = np.stack([stream_key((1, 2, 3, member)) for member in range(8)])
    positions = np.arange(8) * 3
    together = uniforms(keys, positions)
    alone = [uniforms(keys[i : i + 1], positions[i : i + 1])[0] for i in range(8)]
    assert together.tolist() == alone
    shuffled = np.random.default_rng(0).permutation(8)
    assert uniforms(keys[shuffled], positions[shuffled]).tolist() == together[shuffled].tolist()


def test_streams_that_differ_in_one_part_are_unrelated_and_order_matters():
    streams = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0), (10,), (1, 0)]
    keys = {tuple(stream_key(stream).tolist()) for stream in streams}
    assert len(keys) == len(streams)
    positions = np.arange(4000)
    columns = [uniforms(np.repeat(stream_key(s)[None], 4000, 0), positions) for s in streams[:3]]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(columns[a], columns[b])[0, 1]) < 4 / np.sqrt(4000)
    assert abs(np.corrcoef(columns[0][1:], columns[0][:-1])[0, 1]) < 4 / np.sqrt(4000)


def test_numbers_are_uniform_on_the_half_open_unit_interval():
    n = 200_000
    numbers = uniforms(np.repeat(stream_key((5,))[None], n, 0), np.arange(n))
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.bincount((numbers * 100).astype(int), minlength=100)
    chi2 = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert chi2 < 99 + 5 * np.sqrt(2 * 99)  # five standard deviations of a chi-square with 99 degrees of freedom


def test_positions_beyond_32_bits_are_told_apart():
    key = np.repeat(stream_key((1,))[None], 2, 0)
    first, far = uniforms(key, np.array([5, 5 + 2**32]))
    assert first != far

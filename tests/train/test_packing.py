"""Packing: nothing lost, nothing twice, any position can be returned to, and memory does not follow the corpus."""

from __future__ import annotations

import itertools
import random
from array import array
from pathlib import Path

import pytest
import torch
from lowtide.train.corpus import Corpus
from lowtide.train.packing import Layout, PackedBlocks, Split, held_out_blocks, positions, split_corpus, text_documents
from lowtide.train.streams import GROUP, IGNORED, START, Document, Position, Stream, WholeStream, best_fit

from distributed.train_ranks import shared
from lowtide.errors import ArgumentValueError
from lowtide.measure.units import mib

EOS = 0
CORPUS_CODE = """
import sys, warnings
warnings.simplefilter("error")
from lowtide.measure.resident import peak_resident_bytes, reset_peak_resident, resident_bytes
from lowtide.train.corpus import open_corpus
from lowtide.train.packing import text_documents
from lowtide.train.streams import Stream
start = resident_bytes()
reset_peak_resident()
corpus = open_corpus([sys.argv[1]], text_field="text", streams=1, seq_len=256)
lengths = lambda text: [len(word) for word in text.split()]
read = text_documents(corpus, lengths, eos=0)
stream = Stream(read, lambda _: range(len(corpus)), seq_len=256, epochs=1)
print(sum(1 for _ in stream), peak_resident_bytes() - start)
"""


def tokenize(text: str) -> list[int]:
    return [ord(c) for c in text]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    files = []
    for i in range(6):
        files.append(tmp_path / f"{i}.txt")
        files[-1].write_text("".join(f"file {i} line {j}\n" for j in range(7 * i + 1)))
    return Corpus(tuple(files), tuple(f.stat().st_size for f in files), 48, "text", 0)


def stream_of(corpus: Corpus, split: Split, row: int = 0, rows: int = 1, **kwargs: object) -> Stream:
    kwargs = {"seq_len": 16} | kwargs
    read = text_documents(corpus, tokenize, eos=EOS)
    return Stream(read, lambda epoch: split.share(row, rows, epoch), **kwargs)  # type: ignore[arg-type]


def ids_of(stream: Stream, count: int) -> list[torch.Tensor]:
    return [block["input_ids"] for block in itertools.islice(stream, count)]


def layout_of(corpus: Corpus, seq_len: int) -> Layout:
    read = text_documents(corpus, tokenize, eos=EOS)
    return Layout(read=read, seq_len=seq_len, packing="joined", whole=False, pad=EOS)


def tokens_of(corpus: Corpus, pieces: list[int]) -> list[int]:
    return [t for p in pieces for d in corpus.documents(p) for t in [*tokenize(d), EOS]]


@pytest.mark.parametrize("seq_len", [2, 3, 16, 47, 200])
def test_blocks_joined_are_the_documents_with_an_end_after_each(corpus: Corpus, seq_len: int) -> None:
    split = Split(pieces=len(corpus), held_out=2, seed=1)
    stream = tokens_of(corpus, split.share(0, 1, 0)) + tokens_of(corpus, split.share(0, 1, 1))
    blocks = ids_of(stream_of(corpus, split, seq_len=seq_len), len(stream) // seq_len)
    assert all(len(block) == seq_len and block.dtype == torch.int64 for block in blocks)
    assert torch.cat(blocks).tolist() == stream[: len(blocks) * seq_len]


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_shares_and_held_out_pieces_are_all_pieces_once(corpus: Corpus, rows: int) -> None:
    split = Split(pieces=len(corpus), held_out=3, seed=5)
    for epoch in (0, 1, 7):
        dealt = [split.share(row, rows, epoch) for row in range(rows)]
        assert sorted(itertools.chain(split.held_out_pieces(), *dealt)) == list(range(len(corpus)))
    for row in range(rows):  # a stream keeps its pieces, or a faster one would read a slower one's
        assert {frozenset(split.share(row, rows, epoch)) for epoch in range(4)} == {
            frozenset(split.share(row, rows, 0))
        }


def test_order_follows_seed_and_epoch(corpus: Corpus) -> None:
    a, b = (Split(pieces=500, held_out=3, seed=seed) for seed in (1, 2))
    assert a.share(0, 2, 0) == Split(pieces=500, held_out=3, seed=1).share(0, 2, 0)
    assert a.share(0, 2, 0) != a.share(0, 2, 1)
    assert a.held_out_pieces() != b.held_out_pieces()


def test_any_position_can_be_returned_to(corpus: Corpus) -> None:
    split = Split(pieces=len(corpus), held_out=2, seed=3)
    stream = stream_of(corpus, split)
    seen = [(block["input_ids"], stream.position) for block in itertools.islice(stream, 150)]
    assert seen[-1][1].epoch >= 1, "the test should cross into another epoch"
    for at in range(0, 140, 7):
        again = ids_of(stream_of(corpus, split, position=seen[at][1]), 10)
        for block, (expected, _) in zip(again, seen[at + 1 :], strict=False):
            assert torch.equal(block, expected)


def test_rows_of_a_batch_are_streams_and_the_state_restores_them(corpus: Corpus) -> None:
    split = Split(pieces=len(corpus), held_out=2, seed=3)

    def packed(start: list[Position]) -> PackedBlocks:
        return PackedBlocks([stream_of(corpus, split, row, 3, position=p) for row, p in enumerate(start)])

    blocks = packed([Position()] * 3)
    rows = [item["input_ids"] for item in itertools.islice(blocks, 30)]
    for row in range(3):
        alone = ids_of(stream_of(corpus, split, row, 3), 10)
        assert all(torch.equal(a, b) for a, b in zip(rows[row::3], alone, strict=True))
    following = [item["input_ids"] for item in itertools.islice(packed(positions(blocks.state())), 6)]
    for row in range(3):
        alone = ids_of(stream_of(corpus, split, row, 3), 12)[10:]
        assert all(torch.equal(a, b) for a, b in zip(following[row::3], alone, strict=True))


def test_every_stream_has_a_piece_beside_those_held_out(corpus: Corpus) -> None:
    for streams in (1, len(corpus) // 2, len(corpus) - 1):
        split = split_corpus(corpus, seed=0, held_out_bytes=10**9, streams=streams)
        assert split.held_out >= 1
        assert all(split.share(stream, streams, 0) for stream in range(streams))


def test_held_out_blocks_hold_no_training_text(corpus: Corpus) -> None:
    split = split_corpus(corpus, seed=0, held_out_bytes=60, streams=1)
    blocks = torch.stack([block["input_ids"] for block in held_out_blocks(split, layout_of(corpus, 8), limit=5)])
    assert blocks.shape == (5, 8)
    assert blocks.flatten().tolist() == tokens_of(corpus, split.held_out_pieces())[:40]


def test_text_without_a_token_ends_in_an_error_not_in_a_loop(corpus: Corpus, tmp_path: Path) -> None:
    empty = tmp_path / "e.jsonl"
    empty.write_text('{"text": ""}\n' * 10)
    nothing = Corpus((empty,), (empty.stat().st_size,), 32, "text", 0)
    with pytest.raises(ArgumentValueError, match="Documents are empty"):
        next(iter(stream_of(nothing, Split(pieces=len(nothing), held_out=1, seed=0))))


def test_held_out_text_shorter_than_a_block_is_an_error(corpus: Corpus) -> None:
    split = Split(pieces=len(corpus), held_out=1, seed=0)
    with pytest.raises(ArgumentValueError, match="held-out text of 9999 tokens"):
        held_out_blocks(split, layout_of(corpus, 9999), limit=5)


@pytest.mark.parametrize("suffix", [pytest.param("txt", marks=pytest.mark.slow), "jsonl"])
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, suffix: str) -> None:
    line = '{"text": "%s"}\n' % ("low tide " * 50) if suffix == "jsonl" else "low tide " * 50 + "\n"
    script = tmp_path / "corpus.py"
    script.write_text(CORPUS_CODE)
    grown = {}
    for size in (1, 64):
        path = tmp_path / f"{size}.{suffix}"
        path.write_text(line * (size * 2**20 // len(line)))
        ended = shared()(1, path, script=script)
        assert ended.statuses == [0], ended
        blocks, grown[size] = map(int, ended.out[0].split())
        assert blocks > size * 600
    assert mib(grown[64]) < mib(grown[1]) + 8, "eight times less than the corpus grew"


def documents(sizes: list[int], per_piece: int = 3) -> list[list[Document]]:
    """Pieces of documents whose tokens tell which they are, and which of its own tokens each is."""
    made = [Document(array("q", [100 * i + j for j in range(size)])) for i, size in enumerate(sizes)]
    return [made[i : i + per_piece] for i in range(0, len(made), per_piece)]


def separate_documents(block: dict[str, torch.Tensor]) -> list[list[int]]:
    """What is in a block, told by its positions alone; where it has none, by its padding, -1."""
    if "position_ids" not in block:
        kept = int((block["input_ids"] != -1).sum())
        return [part.tolist() for part in block["input_ids"].tensor_split([kept]) if len(part)]
    starts = (block["position_ids"] == 0).nonzero().flatten().tolist()
    return [part.tolist() for part in block["input_ids"].tensor_split(starts[1:])]


@pytest.mark.parametrize("packing", ["separate", "none"])
def test_separate_texts_begin_again_at_position_0_and_are_all_there(corpus: Corpus, packing: str) -> None:
    split = Split(pieces=len(corpus), held_out=2, seed=1)
    stream = tokens_of(corpus, split.share(0, 1, 0))
    found = list[int]()
    for block in stream_of(corpus, split, seq_len=23, packing=packing, pad=-1, epochs=1):
        assert ("position_ids" in block) == (packing == "separate")
        places = block.get("position_ids", torch.arange(23))
        assert (block["labels"][places == 0] == IGNORED).all()
        inner = (block["input_ids"] != -1) & (places > 0)
        assert torch.equal(block["labels"][inner], block["input_ids"][inner])
        parts = separate_documents(block)
        assert packing == "separate" or len(parts) <= 2
        for part in parts:
            assert EOS not in part[:-1], "a document ends with the end of text, and another one begins"
        found += [token for part in parts for token in part if token != -1]
    assert found == stream[: len(found)]
    assert len(stream) - len(found) < 23


def test_joined_text_has_no_positions_and_its_first_token_no_label(corpus: Corpus) -> None:
    block = next(iter(stream_of(corpus, Split(pieces=len(corpus), held_out=2, seed=1))))
    assert block.keys() == {"input_ids", "labels"}
    assert block["labels"][0] == IGNORED
    assert torch.equal(block["labels"][1:], block["input_ids"][1:])


@pytest.mark.parametrize("packing", ["separate", "none"])
@pytest.mark.parametrize("seed", range(5))
def test_whole_documents_are_packed_once_each_and_never_cut(packing: str, seed: int) -> None:
    rng = random.Random(seed)
    room = rng.randint(5, 40)
    sizes = [rng.randint(1, room) for _ in range(120)]
    pieces = documents(sizes)
    stream = WholeStream(
        lambda n: iter(pieces[n]), lambda _: range(len(pieces)), seq_len=room, packing=packing, pad=-1, epochs=1
    )
    blocks = list(stream)
    parts = [part for block in blocks for part in separate_documents(block)]
    whole = sorted(part for part in parts if part[0] != -1)
    assert whole == sorted(d.ids.tolist() for piece in pieces for d in piece)
    assert all(set(part) == {-1} for part in parts if part[0] == -1)
    assert all((block["labels"][block["input_ids"] == -1] == IGNORED).all() for block in blocks)
    if packing == "separate":
        assert len(blocks) < 1.25 * sum(sizes) / room + 3, "little padding"


def test_whole_documents_go_on_from_any_block_with_the_same_counts() -> None:
    rng = random.Random(1)
    pieces = documents([rng.choice([0, 3, 5, 9, 16]) for _ in range(200)])

    def stream(position: Position = START) -> WholeStream:
        return WholeStream(
            lambda n: iter(pieces[n]), lambda epoch: range(epoch % 2, len(pieces), 2), seq_len=16, position=position
        )

    running = stream()
    seen = [(block["input_ids"], running.position, running.read_to) for block in itertools.islice(running, 4 * GROUP)]
    assert seen[-1][1].epoch >= 1
    for at in range(0, 3 * GROUP, 5):
        resumed = stream(seen[at][1])
        for (expected, position, read_to), block in zip(seen[at + 1 :], resumed, strict=False):
            assert torch.equal(block["input_ids"], expected)
            assert (resumed.position, resumed.read_to) == (position, read_to)
    assert seen[-1][2].left_out > 10


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_puts_all_in_and_overfills_none(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 50) for _ in range(rng.randint(1, 80))]
    bins = best_fit(sizes, 50)
    assert sorted(itertools.chain(*bins)) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in members) <= 50 for members in bins)
    assert best_fit([30, 20, 25, 25], 50) == [[0, 1], [2, 3]]


def test_a_corpus_of_which_nothing_can_be_trained_on_is_an_error() -> None:
    stream = WholeStream(lambda _: iter([Document(array("q"))]), lambda _: range(4), seq_len=8)
    with pytest.raises(ArgumentValueError, match="within --seq-len"):
        next(iter(stream))

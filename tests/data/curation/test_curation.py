"""Curation in blocks: the same result however it is divided, stopped and continued."""

import gzip

import pytest
from curations import Stopper, config, lines, prompts, run, sources

from klear_core.artifacts.records import read_shards
from klear_core.config.curate import CurateConfig
from klear_core.config.data import FileSource
from klear_core.data.candidates import DroppedRow
from klear_core.data.curation.work_plan import make_plan
from klear_core.errors import DataError


def test_a_curation_stopped_anywhere_and_continued_gives_the_same_bytes(tmp_path):
    cfg = config(sources(tmp_path / "data"))
    whole = Stopper()
    summary, expected = run(cfg, tmp_path / "whole", whole)
    assert {note for note, _, _ in whole.seen} == {"reading", "comparing", "writing", "dropping", "done"}
    assert sum(summary.ledger[2].dropped.values()) > 20
    for stop_at in range(1, len(whole.seen), 2):
        out = tmp_path / f"stopped{stop_at}"
        with pytest.raises(KeyboardInterrupt):
            run(cfg, out, Stopper(stop_at))
        assert run(cfg, out) == (summary, expected), whole.seen[stop_at - 1]


def test_blocks_that_were_read_are_not_read_again(tmp_path):
    cfg = config(sources(tmp_path / "data"))
    with pytest.raises(KeyboardInterrupt):
        run(cfg, tmp_path / "out", Stopper(4))
    again = Stopper()
    run(cfg, tmp_path / "out", again)
    assert again.seen[0] == ("reading", 3, 5)


@pytest.mark.parametrize("changed", ["s1.jsonl", "bench.jsonl"])
def test_what_was_read_before_a_file_changed_is_not_used(changed, tmp_path):
    data = sources(tmp_path / "data")
    with pytest.raises(KeyboardInterrupt):
        run(config(data), tmp_path / "out", Stopper(5))
    (data / changed).write_text(lines(prompts(120, seed=77)))
    again = Stopper()
    found = run(config(data), tmp_path / "out", again)
    assert again.seen[0] == ("reading", 0, 5)
    assert found == run(config(data), tmp_path / "fresh")


def test_another_seed_or_shard_size_starts_anew(tmp_path):
    data = sources(tmp_path / "data")
    with pytest.raises(KeyboardInterrupt):
        run(config(data), tmp_path / "out", Stopper(8))
    other = config(data, rows_per_shard=70)
    assert run(other, tmp_path / "out") == run(other, tmp_path / "fresh")


def test_drop_records_are_in_the_order_of_the_rows(tmp_path):
    data = sources(tmp_path / "data")
    run(config(data), tmp_path / "out")
    drops = list(read_shards(tmp_path / "out/work/dropped", DroppedRow))
    places = [(d.source, int(d.row.rpartition(":")[2])) for d in drops if d.source == "s1"]
    assert places == sorted(places)
    order = list(dict.fromkeys(d.source for d in drops))
    assert order == [name for name in ("s0", "s1", "packed", "s2", "chain") if name in order]


def test_nothing_but_the_result_is_left(tmp_path):
    run(config(sources(tmp_path / "data")), tmp_path / "out")
    names = {path.name for path in (tmp_path / "out/work").iterdir()}
    assert names == {"problems", "rows", "dropped", "leaks", "leaks.html"}


def test_a_curation_stopped_while_its_tables_are_moved_is_made_again(tmp_path):
    cfg = config(sources(tmp_path / "data"))
    expected = run(cfg, tmp_path / "whole")
    in_the_way = tmp_path / "out/work/rows"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("a file, so that `problems` can be moved and `rows` cannot")
    with pytest.raises(OSError, match="rows"):
        run(cfg, tmp_path / "out")
    in_the_way.unlink()
    assert run(cfg, tmp_path / "out") == expected


def test_a_block_that_cannot_be_read_to_its_end_is_an_error_and_the_others_are_kept(tmp_path):
    data = sources(tmp_path / "data")
    packed = (data / "packed.jsonl.gz").read_bytes()
    whole = config(data)
    (data / "packed.jsonl.gz").write_bytes(packed[:-300])
    with pytest.raises(DataError, match=r"packed\.jsonl\.gz: cannot be read beyond row"):
        run(whole, tmp_path / "out")


def test_blocks_of_a_large_source_depend_on_its_size_alone(tmp_path):
    rows = lines([{"problem": "x" * 1000, "answer": str(i)} for i in range(40_000)])
    (tmp_path / "large.jsonl").write_text(rows)
    small = [tmp_path / f"small-{i:05d}.jsonl" for i in range(8)]
    for path in small:
        path.write_text(rows[:5000])
    cfg = CurateConfig(
        sources=tuple(FileSource(path=p) for p in (f"{tmp_path}/large.jsonl", f"{tmp_path}/small-*.jsonl"))
    )
    plan = make_plan(cfg, (), seed=0)
    assert [block.source for block in plan.blocks] == [0, 0, 0, 1]  # 41 MB in blocks of 16 MB; small files together
    assert [len(block.pieces) for block in plan.blocks] == [1, 1, 1, 8]
    assert plan == make_plan(cfg, (), seed=0)


@pytest.mark.parametrize("limit", [1, 119, 120, 121, 300])
def test_the_limit_counts_rows_over_all_files_of_a_source(limit, tmp_path):
    for i, seed in enumerate((4, 5)):
        (tmp_path / f"a{i}.jsonl").write_text(
            lines([{"problem": f"What is {n}+{seed}?", "answer": "1"} for n in range(120)])
        )
    (tmp_path / "b0.jsonl").write_bytes((tmp_path / "a0.jsonl").read_bytes())
    (tmp_path / "b1.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a1.jsonl").read_bytes()))
    for name in ("a", "b"):
        cfg = CurateConfig(sources=(FileSource(path=f"{tmp_path}/{name}*", limit=limit),))
        summary, _ = run(cfg, tmp_path / f"out{name}")
        assert summary.counts["rows"] == min(limit, 240)

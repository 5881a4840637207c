"""The server keeps its last states, and its operator can go back to one; the sites go back with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from problems import generic

import flatfed as ff

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")

from federation_in_process import NAMES, Deployment, assert_same_bits, local, only, trained_in
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from flatfed.deployment import server_app


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("round-")) for path in (folder / "states").iterdir())


def model_file(folder: Path) -> Path:
    (path,) = folder.glob("server-*.safetensors")
    return path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


STATEFUL = {
    "control variates": {"name": "scaffold"},
    "error feedback": {"name": "fedavg", "compress": {"part": "error_feedback", "of": {"part": "quantize"}}},
    "estimates": {"name": "scaffold", "compress": {"part": "error_feedback21", "of": {"part": "top_k"}}},
    "duals": {"name": "fedsmoo"},
}


@pytest.mark.parametrize("back", [3, 4, 5])
@pytest.mark.parametrize("kind", STATEFUL)
def test_the_rounds_after_it_are_the_same_again(kind, back, tmp_path):
    """Sites that took part meanwhile have the state of that time still."""
    algorithm = ff.build(STATEFUL[kind])
    deployment = Deployment(tmp_path, algorithm, rounds=6)
    also = ["flatness_distance"] if algorithm.compressed else []
    first = deployment.serve()
    assert kept(tmp_path / "run") == [3, 4, 5]
    deployment.restart()
    again = deployment.serve(from_round=back)
    assert sorted({number for client in range(8) for number in deployment.asked(client)}) == list(
        range(back, 6)
    )
    assert_same_bits(first, again)
    assert_same_bits(local(deployment), again, *also)


def test_vectors_that_are_sent_once_are_sent_again_after_it(tmp_path):
    deployment = Deployment(tmp_path, generic("fedsynsam"), rounds=4)
    deployment.serve()
    for back in (3, 1):
        deployment.restart()
        assert_same_bits(local(deployment), deployment.serve(from_round=back))


def scaled(factor: float) -> object:
    def change(reply: Message) -> Message:
        arrays = dict(reply.content["vectors"])
        array = arrays["displacement"]
        data = factor * torch.frombuffer(bytearray(array.data), dtype=torch.float64)
        arrays["displacement"] = Array(array.dtype, array.shape, array.stype, data.numpy().tobytes())
        reply.content["vectors"] = ArrayRecord(arrays)
        return reply

    return change


def test_what_a_site_poisoned_within_the_bounds_is_undone_and_the_site_left_out(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=4, participants=8)
    only(deployment, 5, 2, scaled(500.0))
    poisoned = deployment.serve()
    assert poisoned.history[2]["update_norm"] > 20 * poisoned.history[1]["update_norm"]
    deployment.restart({"leave_out": (NAMES[5],)})
    served = deployment.serve(from_round=2)
    assert_same_bits(local(deployment, {(2, 5), (3, 5)}), served)
    abandoned = tmp_path / "run" / "abandoned-1"
    assert len((abandoned / "history.jsonl").read_text().splitlines()) == 4
    assert json.loads((abandoned / "checkpoint" / "manifest.json").read_text())["round"] == 4
    assert (abandoned / "round-3").is_dir() and kept(tmp_path / "run") == [1, 2, 3]


def test_it_can_be_done_more_than_once_and_in_the_middle_of_a_run(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=5)
    deployment.serve()
    for back, rounds in ((3, 5), (4, 6), (3, 6), (5, 7)):
        deployment.restart(rounds=rounds)
        served = deployment.serve(from_round=back)
        assert_same_bits(local(deployment), served)
    assert json.loads((tmp_path / "run" / "restarts.json").read_text()) == {"restarts": 4}


def test_a_message_from_before_the_server_went_back_is_refused(tmp_path):
    """It would bring the abandoned rounds back to life."""
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=5, participants=8)
    deployment.serve()
    site, old = next(sent for sent in deployment.grid.sent if trained_in(sent[1]) == 4)
    deployment.restart()
    deployment.serve(from_round=3)
    deployment.restart()
    reply = deployment.grid.call(site, old)
    assert reply.has_error() and "the message is out of date" in str(reply.error.reason)


@pytest.mark.parametrize(("keep", "rounds"), [(0, []), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_as_many_states_are_kept_as_the_settings_say(keep, rounds, tmp_path):
    """At the sites, too: one more than the server's, for the round that goes on."""
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=5, participants=8, keep_states=keep)
    deployment.serve()
    states = tmp_path / "run" / "states"
    assert (kept(tmp_path / "run") if states.exists() else []) == rounds
    assert len(deployment.files(0)) == min(5, keep + 2)


def test_a_state_that_is_not_kept_is_named(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=5)
    with pytest.raises(ff.FlatfedError, match=r"^from_round = 2: .* has no such state; .* \(none\)"):
        deployment.serve(from_round=2)
    deployment.restart()
    deployment.serve()
    deployment.restart()
    with pytest.raises(ff.FlatfedError, match=r"^from_round = 1: .* choose one that is kept \(2, 3, 4\)"):
        deployment.serve(from_round=1)
    assert not (tmp_path / "run" / "abandoned-1").exists()


DAMAGE = {
    "model": lambda folder: flip(model_file(folder / "checkpoint")),
    "model gone": lambda folder: model_file(folder / "checkpoint").unlink(),
    "client state": lambda folder: flip(next((folder / "checkpoint").glob("clients-*"))),
    "manifest": lambda folder: (folder / "checkpoint" / "manifest.json").write_text("{"),
    "manifest of another round": lambda folder: shutil.copy(
        folder / "states" / "round-4" / "manifest.json", folder / "checkpoint" / "manifest.json"
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_state_names_the_way_back(kind, tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=5)
    deployment.serve()
    DAMAGE[kind](tmp_path / "run")
    deployment.restart(rounds=6)
    with pytest.raises(
        ff.FlatfedError, match=r"; to go back, start with --from-round 4 \(kept: 2, 3, 4\)$"
    ) as raised:
        deployment.serve()
    assert "\n" not in str(raised.value)
    deployment.restart(rounds=6)
    assert_same_bits(local(deployment), deployment.serve(from_round=4))


def test_a_damaged_kept_state_is_refused_and_the_next_one_works(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=5)
    deployment.serve()
    flip(model_file(tmp_path / "run" / "states" / "round-4"))
    (tmp_path / "run" / "states" / "round-3" / "manifest.json").write_text("{")
    deployment.restart()
    with pytest.raises(
        ff.FlatfedError, match=r"checkpoint/server-4-.*damaged.*--from-round 3 \(kept: 2, 3\)$"
    ):
        deployment.serve(from_round=4)
    deployment.restart()
    with pytest.raises(ff.FlatfedError, match=r"round-3/manifest\.json: "):
        deployment.serve(from_round=3)
    deployment.restart()
    assert_same_bits(local(deployment), deployment.serve(from_round=2))


@pytest.mark.parametrize("content", ["", "[]", '{"restarts": -1}', '{"restarts": true}', '{"restarts": "1"}'])
def test_a_damaged_count_of_restarts_is_refused(content, tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=3)
    deployment.serve()
    (tmp_path / "run" / "restarts.json").write_text(content)
    deployment.restart()
    with pytest.raises(ff.FlatfedError, match=r"restarts\.json: "):
        deployment.serve()


def test_divergence_names_the_way_back(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=3)
    deployment.serve()
    deployment.restart(rounds=6)

    def explode(site: str, message: Message, reply: Message) -> Message:
        if trained_in(message) == 4:
            array = message.content["vectors"]["model"]
            huge = torch.full(tuple(array.shape), 1e200, dtype=torch.float64).numpy().tobytes()
            vectors = ArrayRecord({"model": Array(array.dtype, array.shape, array.stype, huge)})
            message.content["vectors"] = vectors
            return deployment.grid.call(site, message)
        return reply

    deployment.grid.fault = explode
    with pytest.raises(ff.DivergedError, match=r"; to go back, start with --from-round 3 \(kept: 1, 2, 3\)$"):
        deployment.serve()


def test_a_server_killed_while_it_goes_back_can_do_it_again(tmp_path, monkeypatch):
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=5)
    deployment.serve()
    from flatfed.deployment import states

    real, calls = states.write_atomically, []

    class Killed(BaseException):
        """As good as kill -9: nobody catches it."""

    for steps in range(1, 12):
        calls.clear()

        def write(path: Path, content: bytes, steps: int = steps) -> None:
            calls.append(path)
            if len(calls) == steps:
                raise Killed
            real(path, content)

        deployment.restart()
        with monkeypatch.context() as patch:
            patch.setattr(states, "write_atomically", write)
            try:
                states.KeptStates(tmp_path / "run", 3).go_back(3)
            except Killed:
                continue
        break
    assert steps > 4
    deployment.restart()
    assert_same_bits(local(deployment), deployment.serve(from_round=3))


@pytest.mark.parametrize("number", [-1, True, "3", 2.5])
def test_the_app_goes_back_if_its_run_config_says_so(number, tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=5)
    first = deployment.serve()
    app = server_app(deployment.spec)
    config = {"folder": str(tmp_path / "run"), "from-round": 3}
    app(deployment.grid, Context(1, 1, {}, RecordDict(), config))
    assert json.loads((tmp_path / "run" / "restarts.json").read_text()) == {"restarts": 1}
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [line["train_loss"] for line in lines] == [line["train_loss"] for line in first.history]
    app(deployment.grid, Context(1, 1, {}, RecordDict(), {**config, "from-round": 0}))
    with pytest.raises(ff.FlatfedError, match=r"from-round = .*: give the number of a round"):
        app(deployment.grid, Context(1, 1, {}, RecordDict(), {**config, "from-round": number}))

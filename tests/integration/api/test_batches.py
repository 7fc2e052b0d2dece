"""`/v1/files` and `/v1/batches` by the official `openai` client, over a scripted model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch
from starlette.types import Message, Receive, Scope, Send

from mooncake.api.app import create_app
from mooncake.api.batches import runner
from mooncake.api.batches.runner import BYTES_HERE
from mooncake.api.batches.store import BatchRow, BatchStore
from mooncake.api.config import ApiConfig, ApiKey
from mooncake.api.http.request_body import MAX_PARTS
from mooncake.base import Failure, GenerateRequest, MonotonicClock, OutputEvent, Priority
from mooncake.telemetry.metrics import Metrics
from mooncake.telemetry.receipts import Receipts
from tests.integration.api.test_receipts import Recorded
from tests.support.api.batch_client import CHAT, WAIT_S, jsonl, line, results, start, until
from tests.support.api.server import (
    ScriptedBackend,
    answer,
    live_api_server,
    refusal,
    says,
    tiny_model,
    tiny_tokenizer,
)
from tests.support.waiting import LONG_S

EACH = (Priority.INTERACTIVE, Priority.BATCH)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOK_S", 0.2)
    monkeypatch.setattr(runner, "ROOM_S", 0.02)
    monkeypatch.setattr(runner, "RETRY_S", 0.05)


def key(name: str, **fields: Any) -> ApiKey:
    digest = hashlib.sha256(name.encode()).digest()
    return ApiKey(digest=digest, name=name, **{"priorities": EACH} | fields)


def config(folder: Path | None, **fields: Any) -> ApiConfig:
    batch_dir = None if folder is None else str(folder)
    return ApiConfig(port=0, drain_s=0.2, gateway_id="gw", batch_dir=batch_dir, **fields)


def run(
    folder: Path | None,
    play: Callable[[AsyncOpenAI, str], Awaitable[None]],
    *,
    backend: ScriptedBackend | None = None,
    api_key: str = "none",
    receipts: Receipts | None = None,
    **fields: Any,
) -> ScriptedBackend:
    """Have `play` use a server; it gets a client and the server's URL. Return the backend."""
    backend = backend or ScriptedBackend(says("hello"))

    async def main() -> None:
        async with (
            live_api_server(backend, config=config(folder, **fields), receipts=receipts) as url,
            AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0) as client,
        ):
            await play(client, url)

    asyncio.run(main())
    return backend


def database(folder: Path, *words: str) -> list[Any]:
    """Run SQL beside the server."""
    db = sqlite3.connect(folder / "batches.sqlite", timeout=LONG_S)
    with db:
        found = [row for each in words for row in db.execute(each)]
    db.close()
    return found


def test_a_batch_from_its_file_to_its_answers(tmp_path: Path) -> None:
    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await start(client, [line(f"q{at}") for at in range(20)], metadata={"run": "7"})
        assert batch.object == "batch"
        assert (batch.status, batch.endpoint) == ("validating", CHAT)
        assert batch.expires_at == batch.created_at + 24 * 3600
        batch = await until(client, batch)
        assert batch.status == "completed"
        assert batch.metadata == {"run": "7"}
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
        assert batch.error_file_id is None
        times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        assert None not in times
        assert list(times) == sorted(times)  # type: ignore[type-var]
        output, _ = await results(client, batch)
        assert [each["custom_id"] for each in output] == [f"q{at}" for at in range(20)]
        for each in output:
            assert each["error"] is None
            assert each["response"]["status_code"] == 200
            body = each["response"]["body"]
            assert body["choices"][0]["message"]["content"] == "hello"
            assert body["usage"]["completion_tokens"] > 0
        assert len({each["id"] for each in output}) == 20
        assert [each.id async for each in client.batches.list()] == [batch.id]
        found = {each.id: each.purpose async for each in client.files.list()}
        assert found == {batch.input_file_id: "batch", batch.output_file_id: "batch_output"}
        left = "SELECT count(*) FROM results"
        async with asyncio.timeout(WAIT_S):
            while await asyncio.to_thread(database, tmp_path / "batches", left) != [(0,)]:
                await asyncio.sleep(0.02)

    backend = run(tmp_path / "batches", play)
    assert {each.priority for each in backend.requests} == {Priority.BATCH}
    for path in (tmp_path / "batches" / "files", tmp_path / "batches" / "batches.sqlite"):
        assert path.stat().st_mode & 0o077 == 0, f"others may open {path}"


def test_completions_and_lines_that_are_refused(tmp_path: Path) -> None:
    url_of = "/v1/completions"

    async def play(client: AsyncOpenAI, url: str) -> None:
        lines = [
            line("good", url_of, prompt="hi", max_tokens=4),
            line("bad", url_of, prompt="hi", max_tokens=-1),
            line("other", url_of, prompt="hi", model="unknown"),
        ]
        batch = await until(client, await start(client, lines, url_of))
        assert batch.status == "completed"
        output, errors = await results(client, batch)
        assert [each["custom_id"] for each in output] == ["good"]
        assert [each["custom_id"] for each in errors] == ["bad", "other"]
        statuses = [each["response"]["status_code"] for each in errors]
        assert statuses == [400, 404]
        assert "max_tokens" in errors[0]["response"]["body"]["error"]["message"]
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)

    run(tmp_path, play)


def test_an_input_with_mistakes_fails_with_their_lines(tmp_path: Path) -> None:
    async def play(client: AsyncOpenAI, url: str) -> None:
        lines = [line("a"), line("a"), {"custom_id": "b"}, line("c", "/v1/completions")]
        batch = await until(client, await start(client, lines))
        assert batch.status == "failed"
        assert batch.failed_at is not None
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [(each.line, each.code) for each in batch.errors.data] == [
            (2, "duplicate_custom_id"),
            (3, "invalid_request"),
            (4, "invalid_request"),
        ]
        batch = await until(client, await start(client, []))
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [each.code for each in batch.errors.data] == ["empty_file"]

    assert run(tmp_path, play).requests == []


def test_a_batch_with_too_many_lines_names_the_limit(tmp_path: Path) -> None:
    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await start(client, [line("a"), line("b"), line("c")]))
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert "max-batch-lines" in str(batch.errors.data[0].message)

    run(tmp_path, play, max_batch_lines=2)


def test_what_is_wrong_with_a_batch_is_told_by_field(tmp_path: Path) -> None:
    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await start(client, [line("a")]))
        good = {"input_file_id": batch.input_file_id, "endpoint": CHAT}
        async with httpx.AsyncClient(base_url=url, timeout=LONG_S) as plain:
            for wrong, status, named in (
                ({"endpoint": "/v1/embeddings"}, 400, "no embeddings"),
                ({"endpoint": "/v1/responses"}, 400, "endpoint"),
                ({"completion_window": "1d"}, 400, "completion_window"),
                ({"completion_window": "999h"}, 400, "168h"),
                ({"metadata": {f"k{at}": "" for at in range(17)}}, 400, "metadata"),
                ({"metadata": {"k": 1}}, 400, "metadata"),
                ({"input_file_id": "file-none"}, 404, "file-none"),
                ({"input_file_id": batch.output_file_id}, 400, "batch_output"),
                ({"input_file_id": None}, 400, "input_file_id"),
                ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "seconds"),
            ):
                reply = await plain.post("/v1/batches", json=good | wrong)
                assert reply.status_code == status, (wrong, reply.text)
                assert named in reply.json()["error"]["message"], (wrong, reply.text)
            for path in (
                "/v1/batches?limit=0", "/v1/files?limit=x", "/v1/files?order=up",
                "/v1/files?limit=00000000199999", f"/v1/files?limit=000000001{'0' * 30}",
            ):  # fmt: skip
                assert (await plain.get(path)).status_code == 400
            for path in ("/v1/batches/batch_none", "/v1/files/file-none/content"):
                assert (await plain.get(path)).status_code == 404
            assert (await plain.post("/v1/batches/batch_none/cancel")).status_code == 404
            assert (await plain.delete("/v1/files/file-none")).status_code == 404
            done = await plain.post(f"/v1/batches/{batch.id}/cancel")
            assert done.status_code == 409
            assert "completed" in done.json()["error"]["message"]

    run(tmp_path, play)


def test_uploads_that_are_refused_leave_nothing(tmp_path: Path) -> None:
    async def play(client: AsyncOpenAI, url: str) -> None:
        file = ("in.jsonl", b"x" * 100)
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=file, purpose="assistants")
        large = ("in.jsonl", b"x" * 4000)
        with pytest.raises(openai.APIStatusError, match="max-batch-file-bytes") as told:
            await client.files.create(file=large, purpose="batch")
        assert told.value.status_code == 413
        for seconds in (10, 10**9):
            with pytest.raises(openai.BadRequestError, match="seconds"):
                await client.files.create(
                    file=file,
                    purpose="batch",
                    expires_after={"anchor": "created_at", "seconds": seconds},
                )
        async with httpx.AsyncClient(base_url=url, timeout=LONG_S) as plain:
            form = {"content-type": "multipart/form-data; boundary=X"}
            head = b'--X\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for body, named in (
                (b"", "last boundary"),
                (b"--X--", "file: is missing"),
                (head + b"{}", "last boundary"),
                (head + b"{}\r\n" + head + b"{}\r\n--X--", "one file"),
                (head.replace(b'"file"', b'"purpose"') + b"x" * 300, "256 bytes"),
                (
                    head
                    + b"{}\r\n"
                    + head.replace(b'"file"', b'"purpose"')
                    + b"batch\r\n"
                    + head.replace(b'"file"', b'"expires_after[seconds]"')
                    + b"000003600"
                    + b"0" * 30
                    + b"\r\n--X--",
                    "seconds must be from 3600 to 2592000",
                ),
                ((head.replace(b"file", b"more") + b"\r\n") * (MAX_PARTS + 1), "fields"),
                (b"--X\r\n\r\n", "no name"),
            ):
                reply = await plain.post("/v1/files", content=body, headers=form)
                assert reply.status_code == 400, (body, reply.text)
                assert named in reply.text, (body, reply.text)
            reply = await plain.post("/v1/files", json={})
            assert reply.status_code == 415
        first = await client.files.create(file=("in.jsonl", b"x" * 900), purpose="batch")
        with pytest.raises(openai.PermissionDeniedError, match="max-tenant-batch-bytes"):
            await client.files.create(file=("in.jsonl", b"x" * 200), purpose="batch")
        await client.files.delete(first.id)
        kept = await client.files.create(
            file=("in.jsonl", b"x" * 200),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )
        assert (kept.bytes, kept.filename, kept.status) == (200, "in.jsonl", "processed")
        assert kept.expires_at == kept.created_at + 7200
        assert (await client.files.content(kept.id)).content == b"x" * 200
        assert (await client.files.retrieve(kept.id)).id == kept.id
        assert [each.name for each in (tmp_path / "files").iterdir()] == [kept.id]

    run(tmp_path, play, max_batch_file_bytes=2000, max_tenant_batch_bytes=1000)


def test_a_tenant_has_a_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.api.batches.service.MAX_FILES", 2)

    async def play(client: AsyncOpenAI, url: str) -> None:
        made = [await client.files.create(file=("a", b""), purpose="batch") for _ in range(2)]
        with pytest.raises(openai.PermissionDeniedError, match="you have 2 files"):
            await client.files.create(file=("a", b""), purpose="batch")
        await client.files.delete(made[0].id)
        await client.files.create(file=("a", b""), purpose="batch")

    run(tmp_path, play)


def test_a_large_file_comes_back_byte_for_byte(tmp_path: Path) -> None:
    content = b"".join(b"%d\r\n--" % at for at in range(400_000))

    async def play(client: AsyncOpenAI, url: str) -> None:
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert file.bytes == len(content) > 3 << 20
        assert (await client.files.content(file.id)).content == content

    run(tmp_path, play)


def test_a_client_that_reads_a_file_slowly_holds_little_of_it(tmp_path: Path) -> None:
    """A message of the application is in memory until the client has taken it."""
    sizes: list[int] = []

    async def main() -> None:
        app = create_app(ScriptedBackend(says("hello")), tiny_model(), config(tmp_path))

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            async def noted(message: Message) -> None:
                sizes.append(len(message.get("body", b"")))
                await send(message)

            await app(scope, receive, noted)

        transport = httpx.ASGITransport(watched)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            form = {"purpose": "batch"}
            content = {"file": ("in.jsonl", b"x" * 1_000_000)}
            made = (await client.post("/v1/files", data=form, files=content)).json()
            sizes.clear()
            await client.get(f"/v1/files/{made['id']}/content")
        await app.state.batches.close()
        app.state.api_server.close()

    asyncio.run(main())
    assert sum(sizes) == 1_000_000
    assert max(sizes) <= 1 << 16


def test_pages_of_lists(tmp_path: Path) -> None:
    async def play(client: AsyncOpenAI, url: str) -> None:
        made = [await start(client, [line("a")]) for _ in range(5)]
        made = [await until(client, each) for each in made]
        newest_first = [each.id for each in reversed(made)]
        page = await client.batches.list(limit=2)
        assert [each.id for each in page.data] == newest_first[:2]
        assert page.has_more
        assert [each.id async for each in client.batches.list(limit=2)] == newest_first
        inputs = [each.input_file_id for each in made]
        files = client.files.list(purpose="batch", limit=2, order="asc")
        assert [each.id async for each in files] == inputs

    run(tmp_path, play)


class Held(ScriptedBackend):
    """A backend that answers nothing until `resume`."""

    def __init__(self) -> None:
        tokens = tiny_tokenizer().encode("hello<|im_end|>")
        super().__init__(lambda request: [None, *answer(request, tokens)])


async def in_flight(backend: ScriptedBackend, num: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while backend.num_hanging < num:
            await asyncio.sleep(0.01)


def test_a_cancelled_batch_keeps_its_answers_and_says_of_each_other_line_why(
    tmp_path: Path,
) -> None:
    backend = Held()

    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await start(client, [line(f"q{at}") for at in range(3)])
        await in_flight(backend, 1)
        assert backend.num_hanging == 1  # batch work waits, so one line is asked
        backend.resume()
        await in_flight(backend, 1)
        with pytest.raises(openai.ConflictError, match="input of"):
            await client.files.delete(batch.input_file_id)
        batch = await client.batches.cancel(batch.id)
        assert batch.status == "cancelling"
        assert batch.cancelling_at is not None
        batch = await until(client, batch)
        assert batch.status == "cancelled"
        assert batch.cancelled_at is not None
        output, errors = await results(client, batch)
        assert [each["custom_id"] for each in output] == ["q0"]
        assert [each["custom_id"] for each in errors] == ["q1", "q2"]
        assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
        assert (await client.batches.cancel(batch.id)).status == "cancelled"
        await client.files.delete(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(batch.input_file_id)

    backend.has_waiting_batch = True
    run(tmp_path, play, backend=backend)
    assert len(backend.aborted) == 1


def test_a_batch_whose_window_has_ended_says_so_of_each_line(tmp_path: Path) -> None:
    backend = Held()

    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await start(client, [line(f"q{at}") for at in range(3)])
        await in_flight(backend, 3)
        await asyncio.to_thread(database, tmp_path, "UPDATE batches SET expires_s = 1")
        batch = await until(client, batch)
        assert batch.status == "expired"
        assert batch.expired_at is not None
        output, errors = await results(client, batch)
        assert output == []
        assert {each["error"]["code"] for each in errors} == {"batch_expired"}
        assert len(errors) == 3

    run(tmp_path, play, backend=backend)


def test_a_batch_whose_input_is_gone_ends_and_keeps_its_answers(tmp_path: Path) -> None:
    ids: list[str] = []
    first = Held()

    async def begin(client: AsyncOpenAI, url: str) -> None:
        batch = await start(client, [line(f"q{at}") for at in range(3)])
        await in_flight(first, 1)
        first.resume()
        await in_flight(first, 1)
        ids.extend([batch.id, batch.input_file_id])

    async def end(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await client.batches.retrieve(ids[0]))
        assert batch.status == "completed"
        output, errors = await results(client, batch)
        assert [each["custom_id"] for each in output] == ["q0"]
        assert [each["error"]["code"] for each in errors] == ["input_file_gone"] * 2

    first.has_waiting_batch = True
    run(tmp_path, begin, backend=first)
    (tmp_path / "files" / ids[1]).unlink()
    assert run(tmp_path, end).requests == []


def test_a_batch_whose_input_is_gone_before_it_was_checked_fails(tmp_path: Path) -> None:
    async def play(client: AsyncOpenAI, url: str) -> None:
        file = await client.files.create(file=jsonl([line("a")]), purpose="batch")
        (tmp_path / "files" / file.id).unlink()
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        batch = await until(client, batch)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [each.code for each in batch.errors.data] == ["input_file_gone"]

    assert run(tmp_path, play).requests == []


def test_a_server_that_ends_in_a_batch_goes_on_with_it_when_it_comes_back(tmp_path: Path) -> None:
    ids: list[str] = []
    first = Held()

    async def begin(client: AsyncOpenAI, url: str) -> None:
        batch = await start(client, [line(f"q{at}") for at in range(6)])
        ids.append(batch.id)
        await in_flight(first, 1)
        first.resume()
        await in_flight(first, 1)
        [[num]] = await asyncio.to_thread(database, tmp_path, "SELECT count(*) FROM results")
        assert num == 1

    async def end(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await client.batches.retrieve(ids[0]))
        assert batch.status == "completed"
        output, errors = await results(client, batch)
        assert [each["custom_id"] for each in output] == [f"q{at}" for at in range(6)]
        assert errors == []

    first.has_waiting_batch = True
    run(tmp_path, begin, backend=first)
    second = run(tmp_path, end)
    assert len(second.requests) == 5, "the line that was answered is not asked again"


def test_another_gateway_takes_over_once_the_first_gives_no_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one ends without a word, as if it was killed: nobody gives its lease back."""
    monkeypatch.setattr(runner, "LEASE_S", 1.0)
    monkeypatch.setattr(BatchStore, "release", lambda *_: None)
    one, two = Held(), ScriptedBackend(says("hello"))
    one.has_waiting_batch = True
    made: list[Batch] = []

    async def begin(client: AsyncOpenAI, url: str) -> None:
        made.append(await start(client, [line(f"q{at}") for at in range(4)]))
        await in_flight(one, 1)
        one.resume()
        await in_flight(one, 1)

    async def end(client: AsyncOpenAI, url: str) -> None:
        output, errors = await results(client, await until(client, made[0]))
        assert [each["custom_id"] for each in output] == [f"q{at}" for at in range(4)]
        assert errors == []

    run(tmp_path, begin, backend=one)
    [(owner,)] = database(tmp_path, "SELECT owner FROM batches")
    assert owner is not None
    run(tmp_path, end, backend=two)
    assert len(two.requests) >= 3


def test_lines_that_are_refused_for_now_are_asked_again(tmp_path: Path) -> None:
    refused: dict[str, int] = {}
    tokens = tiny_tokenizer().encode("hello<|im_end|>")

    def script(request: GenerateRequest) -> list[OutputEvent]:
        name = request.request_id.rpartition("-")[0].rpartition("-")[0]
        refused[name] = refused.get(name, 0) + 1
        statuses = [429, 503, 500, 500]
        if refused[name] <= len(statuses):
            status = statuses[refused[name] - 1]
            failure = Failure(status=status, error_type="Busy", message="not now")
            return refusal(request, failure)
        return answer(request, tokens)

    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await start(client, [line("a")]))
        output, errors = await results(client, batch)
        assert [each["custom_id"] for each in output] == ["a"]
        assert errors == []

    assert len(run(tmp_path, play, backend=ScriptedBackend(script)).requests) == 5


def test_a_line_on_which_the_server_always_fails_ends_in_the_error_file(tmp_path: Path) -> None:
    failure = Failure(status=500, error_type="InternalServerError", message="broken")

    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await start(client, [line("a")]))
        output, errors = await results(client, batch)
        assert output == []
        assert errors[0]["response"]["status_code"] == 500

    backend = ScriptedBackend(lambda request: refusal(request, failure))
    assert len(run(tmp_path, play, backend=backend).requests) == runner.MAX_FAILURES


def test_a_result_that_cannot_be_recorded_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, num_failed = BatchStore.record, 0

    def fails_first(self: BatchStore, *given: Any) -> set[int]:
        nonlocal num_failed
        num_failed += 1
        return record(self, *given) if num_failed > 1 else {1 // 0}

    monkeypatch.setattr(BatchStore, "record", fails_first)

    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await start(client, [line("a"), line("b")]))
        output, errors = await results(client, batch)
        assert [each["custom_id"] for each in output] == ["a", "b"]
        assert errors == []

    run(tmp_path, play)


def test_a_server_without_workers_waits_and_refuses_no_line(tmp_path: Path) -> None:
    backend = ScriptedBackend(says("hello"))
    backend.is_ready = False

    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await start(client, [line("a")]), "in_progress")
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert backend.requests == []
        backend.is_ready = True
        assert (await until(client, batch)).status == "completed"

    run(tmp_path, play, backend=backend)


def test_tenants_do_not_see_each_other_and_pay_for_their_lines(tmp_path: Path) -> None:
    keys = (key("ann", tenant="one"), key("bob"), key("cy", priorities=(Priority.INTERACTIVE,)))

    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await start(client, [line("a"), line("b")]))
        assert batch.status == "completed"
        bob = client.with_options(api_key="bob")
        assert [each async for each in bob.batches.list()] == []
        assert [each async for each in bob.files.list()] == []
        assert batch.output_file_id is not None
        for asked in (
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
            bob.files.retrieve(batch.output_file_id),
            bob.files.content(batch.output_file_id),
            bob.files.delete(batch.output_file_id),
            bob.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await asked
        with pytest.raises(openai.PermissionDeniedError, match="batch"):
            await start(client.with_options(api_key="cy"), [line("a")])
        with pytest.raises(openai.AuthenticationError):
            await start(client.with_options(api_key="nobody"), [line("a")])

    backend = run(tmp_path, play, keys=keys, api_key="ann")
    assert {each.tenant for each in backend.requests} == {"one"}


def test_a_batch_of_a_key_that_is_gone_waits(tmp_path: Path) -> None:
    ids: list[str] = []
    first = Held()

    async def begin(client: AsyncOpenAI, url: str) -> None:
        ids.append((await start(client, [line("a")])).id)
        await in_flight(first, 1)

    async def look(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await client.batches.retrieve(ids[0]), "in_progress")
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 0

    async def end(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await client.batches.retrieve(ids[0]))
        assert batch.status == "completed"

    ann, other = key("ann", tenant="one"), key("other", tenant="one")
    run(tmp_path, begin, backend=first, keys=(ann, other), api_key="ann")
    assert run(tmp_path, look, keys=(other,), api_key="other").requests == []
    run(tmp_path, end, keys=(ann,), api_key="ann")


def test_a_tenant_has_a_number_of_open_batches(tmp_path: Path) -> None:
    backend = Held()

    async def play(client: AsyncOpenAI, url: str) -> None:
        await start(client, [line("a")])
        with pytest.raises(openai.RateLimitError, match="max-tenant-batches"):
            await start(client, [line("a")])

    run(tmp_path, play, backend=backend, max_tenant_batches=1)


def test_answers_that_fill_the_room_of_a_tenant_end_its_batches(tmp_path: Path) -> None:
    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await start(client, [line(f"q{at}") for at in range(9)]))
        assert batch.output_file_id is not None
        again = {"input_file_id": batch.input_file_id, "endpoint": CHAT}
        async with httpx.AsyncClient(base_url=url, timeout=LONG_S) as plain:
            refused = await plain.post("/v1/batches", json=again)
            assert (refused.status_code, "max-tenant-batch-bytes" in refused.text) == (403, True)
            await client.files.delete(batch.output_file_id)
            assert (await plain.post("/v1/batches", json=again)).status_code == 200

    run(tmp_path, play, max_tenant_batch_bytes=2500)


def test_a_file_that_is_deleted_while_a_batch_of_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = BatchStore.add_batch

    def late(self: BatchStore, row: BatchRow, max_open: int) -> bool:
        assert self.delete_file(row.tenant, row.input_file_id) is True
        return add(self, row, max_open)

    monkeypatch.setattr(BatchStore, "add_batch", late)

    async def play(client: AsyncOpenAI, url: str) -> None:
        with pytest.raises(openai.NotFoundError, match="file-"):
            await start(client, [line("a")])
        [batch] = (await client.batches.list()).data
        assert (await until(client, batch)).status == "cancelled"

    run(tmp_path, play)


def test_answers_that_take_too_much_room_end_the_other_lines(tmp_path: Path) -> None:
    backend = ScriptedBackend(says("hello"))
    backend.has_waiting_batch = True  # one line after another

    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await start(client, [line(f"q{at}") for at in range(9)]))
        assert batch.status == "completed"
        output, errors = await results(client, batch)
        assert output
        assert {each["error"]["code"] for each in errors} == {"output_too_large"}
        assert len(output) + len(errors) == 9

    run(tmp_path, play, backend=backend, max_tenant_batch_bytes=2500)


def test_without_a_directory_the_routes_name_the_flag() -> None:
    async def play(client: AsyncOpenAI, url: str) -> None:
        for asked in (
            client.files.create(file=("a", b""), purpose="batch"),
            client.files.list(),
            client.files.retrieve("file-1"),
            client.files.content("file-1"),
            client.files.delete("file-1"),
            client.batches.create(input_file_id="file-1", endpoint=CHAT, completion_window="24h"),
            client.batches.list(),
            client.batches.retrieve("batch_1"),
            client.batches.cancel("batch_1"),
        ):
            with pytest.raises(openai.NotFoundError, match="batch-dir"):
                await asked

    run(None, play)


def test_two_gateways_on_one_directory_answer_each_line_once(tmp_path: Path) -> None:
    one, two = ScriptedBackend(says("hello")), ScriptedBackend(says("hello"))

    async def main() -> None:
        async with (
            live_api_server(one, config=config(tmp_path)) as url,
            live_api_server(two, config=config(tmp_path)) as other,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
            AsyncOpenAI(base_url=f"{other}/v1", api_key="none") as another,
        ):
            made = [await start(client, [line(f"q{at}") for at in range(10)]) for _ in range(4)]
            for each in made:
                batch = await until(another, each)
                output, _ = await results(another, batch)
                assert [line["custom_id"] for line in output] == [f"q{at}" for at in range(10)]

    asyncio.run(main())
    assert len(one.requests) + len(two.requests) == 40


def test_lines_have_receipts_of_their_tenant_and_the_ids_of_their_batch(tmp_path: Path) -> None:
    """They pass through the same code as requests by HTTP."""
    receipts = Receipts(8, MonotonicClock(), "gw")
    backend = Recorded(receipts, says("hello"))
    keys = key("ann", tenant="one"), key("bob", tenant="two")

    async def play(client: AsyncOpenAI, url: str) -> None:
        batch = await until(client, await start(client, [line("a")]))
        output, _ = await results(client, batch)
        name = output[0]["response"]["request_id"]
        assert output[0]["response"]["body"]["id"] == f"chatcmpl-{name}"
        path = f"{url}/v1/requests/chatcmpl-{name}/receipt"
        async with httpx.AsyncClient(timeout=LONG_S) as plain:
            own, other = [
                await plain.get(path, headers={"Authorization": f"Bearer {each.name}"})
                for each in keys
            ]
        assert own.json()["tenant"] == "one"
        assert other.status_code == 404

    run(tmp_path, play, backend=backend, keys=keys, api_key="ann", receipts=receipts)
    assert backend.requests[0].request_id.startswith("chatcmpl-batch_req_")


def test_a_repeat_with_an_idempotency_key_makes_nothing_new(tmp_path: Path) -> None:
    async def play(client: AsyncOpenAI, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=LONG_S) as plain:

            async def post(path: str, name: str, **sent: Any) -> Any:
                reply = await plain.post(path, headers={"Idempotency-Key": name}, **sent)
                assert reply.status_code == 200, reply.text
                return reply.json()["id"]

            form = {
                "content": b'--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
                b'--X\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
                + jsonl([line("a")])
                + b"\r\n--X--"
            }

            async def upload() -> Any:
                plain.headers["content-type"] = "multipart/form-data; boundary=X"
                return await post("/v1/files", "one", **form)

            file_id = await upload()
            assert await upload() == file_id
            assert len(list((tmp_path / "files").iterdir())) == 1
            del plain.headers["content-type"]
            body = {"input_file_id": file_id, "endpoint": CHAT}
            batch_id = await post("/v1/batches", "two", json=body)
            assert await post("/v1/batches", "two", json=body) == batch_id
            assert await post("/v1/batches", "three", json=body) != batch_id
            await until(client, await client.batches.retrieve(batch_id))

    run(tmp_path, play)


def test_a_long_line_is_asked_like_a_short_one(tmp_path: Path) -> None:
    text = "x" * (3 * BYTES_HERE)

    async def play(client: AsyncOpenAI, url: str) -> None:
        lines = [line("long", "/v1/completions", prompt="hi", max_tokens=4, user=text)]
        batch = await until(client, await start(client, lines, "/v1/completions"))
        output, errors = await results(client, batch)
        assert [each["custom_id"] for each in output] == ["long"]
        assert errors == []

    run(tmp_path, play)


def test_metrics_say_how_many_lines_are_left(tmp_path: Path) -> None:
    backend, metrics = Held(), Metrics("tiny")
    backend.has_waiting_batch = True

    async def shown(*wanted: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while any(f"{each}\n" not in metrics.render().decode() for each in wanted):
                await asyncio.sleep(0.02)

    async def main() -> None:
        async with (
            live_api_server(backend, config=config(tmp_path), recorder=metrics) as url,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
        ):
            batch = await start(client, [line(f"q{at}") for at in range(3)])
            labels = '{model_name="tiny"}'
            await in_flight(backend, 1)
            await shown(
                f"mooncake:batches_running{labels} 1.0",
                f"mooncake:batch_lines_asked{labels} 1.0",
                f"mooncake:batch_lines_left{labels} 3.0",
            )
            await client.batches.cancel(batch.id)
            await shown(
                f"mooncake:batches_running{labels} 0.0", f"mooncake:batch_lines_left{labels} 0.0"
            )

    asyncio.run(main())


def test_a_client_that_leaves_in_an_upload_leaves_nothing(tmp_path: Path) -> None:
    async def play(client: AsyncOpenAI, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b'--X\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        writer.write(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000000\r\n"
            b"Content-Type: multipart/form-data; boundary=X\r\n\r\n" + head + b"x" * (3 << 20)
        )
        await writer.drain()
        folder = tmp_path / "files"
        async with asyncio.timeout(WAIT_S):
            while not list(folder.iterdir()):
                await asyncio.sleep(0.01)
            writer.close()
            while list(folder.iterdir()):
                await asyncio.sleep(0.01)

    run(tmp_path, play)


def test_the_input_of_the_tests_is_what_clients_send() -> None:
    assert json.loads(jsonl([line("a")])) == line("a")

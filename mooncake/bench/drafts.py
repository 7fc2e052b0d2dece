"""What became of a server's drafts (speculative decoding) during a run: its counters, twice."""

from __future__ import annotations

import dataclasses
import re

from mooncake.bench.http_client import HttpClient, RequestFailed

_COUNTER = re.compile(
    r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens)(?:_total)?(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)
"""As Mooncake and vLLM name them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """Counts since a server's start, or of a run."""

    drafts: int = 0
    """Steps of a sequence that had drafts."""
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def since(self, before: DraftCounts) -> DraftCounts:
        """Return what has been added since `before`."""
        counts = dataclasses.asdict(before)
        return DraftCounts(**{name: getattr(self, name) - n for name, n in counts.items()})

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts, in percent."""
        return 100 * self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step with drafts gave a sequence, on average."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0


NO_DRAFTS = DraftCounts()


def parse_counts(text: str) -> DraftCounts:
    """Return the sums of the counters in Prometheus' text; zeros where there are none."""
    found = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0.0)
    for name, value in _COUNTER.findall(text):
        found[name] += float(value)
    return DraftCounts(**{name: round(value) for name, value in found.items()})


async def draft_counts(client: HttpClient, headers: dict[str, str]) -> DraftCounts:
    """Return what a server has counted so far; zeros if it does not say."""
    body = bytearray()
    try:
        answer = await client.request(
            "GET", "/metrics", headers, b"", lambda data, _: body.extend(data)
        )
    except RequestFailed:
        return NO_DRAFTS
    return parse_counts(body.decode(errors="replace") if answer.status == 200 else "")

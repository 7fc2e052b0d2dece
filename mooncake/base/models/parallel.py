"""The shape of an instance: how many ranks share one model, and how. Pure values and rules.

An instance is one replica of the model on one or more ranks, each a process with a device of its
own. Its layers are cut into `pp` stages (pipeline parallel), each of which passes activations to
the next. The `tp` ranks of a stage each hold a part of each of its layers (tensor parallel). Groups
of `dcp` ranks share out the KVCache (decode context parallel). With `dcp` 1 every rank holds the KV
of every block, because the latent KV of MLA has one head and cannot be cut by heads.

`dp` instances may share the routed experts (data and expert parallel). Each has sequences and pages
of its own. In each stage, each of the `ep` ranks of these instances holds some whole experts. With
`ep` 1 each rank has columns of every expert. Or `experts` further workers of one rank each hold the
routed experts alone. Then the `dp` instances hold none, and `ep` is the number of these workers.

Rank 0 samples, so it is in the last stage: ranks are numbered from that stage backwards.
"""

from __future__ import annotations

import re

import msgspec

from mooncake.base.errors import ConfigError

TP_FLAG, DCP_FLAG = "tensor-parallel-size", "decode-context-parallel-size"
PP_FLAG = "pipeline-parallel-size"
DP_FLAG, EP_FLAG = "data-parallel-size", "enable-expert-parallel"
EXPERTS_FLAG = "experts"
_NAMES = "pp", "dcp", "dp", "ep", "experts"
_WORDS = re.compile(r"tp([1-9][0-9]*)" + "".join(f"(?:-{name}([1-9][0-9]*))?" for name in _NAMES))


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one instance, and the instances with which it shares its experts.

    Raises:
        ConfigError: a number is below 1, `dcp` does not divide `tp`, `ep` is neither 1 nor all
            ranks of `dp` instances, or workers that hold experts alone serve several ranks.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    dp: int = 1
    ep: int = 1
    experts: int = 0
    """How many workers hold the routed experts and nothing else; 0: there are no such workers."""

    def __post_init__(self) -> None:
        sizes = (TP_FLAG, self.tp), (PP_FLAG, self.pp), (DCP_FLAG, self.dcp), (DP_FLAG, self.dp)
        for flag, number in sizes:
            if number < 1:
                raise ConfigError(f"{flag}: must be at least 1, not {number}")
        if self.tp % self.dcp:
            raise ConfigError(
                f"{DCP_FLAG}: {self.dcp} does not divide {TP_FLAG} {self.tp}; each rank holds one "
                f"share of the context: {_listed(divisors(self.tp))} would do"
            )
        if self.experts:
            self._check_apart()
            return
        if self.dp > 1 and self.ep == 1:
            raise ConfigError(
                f"{DP_FLAG}={self.dp}: workers share their experts only with `{EP_FLAG}`; add it, "
                f"or start {self.dp} workers that share none with `prefill` and `decode`"
            )
        if self.ep not in (1, self.tp * self.dp):
            raise ConfigError(
                f"shape: ep is {self.ep}, but experts lie on 1 rank or are shared out among all "
                f"{self.tp * self.dp}; give one of these numbers"
            )

    def _check_apart(self) -> None:
        """Raise ConfigError if no workers can hold the experts of this shape alone."""
        for flag, size in ((TP_FLAG, self.tp), (PP_FLAG, self.pp)):
            if size > 1:
                raise ConfigError(
                    f"{EXPERTS_FLAG}={self.experts}: engines whose experts are on other workers "
                    f"have one rank each, and {flag} is {size}; leave one of them out, or raise "
                    f"{DP_FLAG} instead"
                )
        if self.ep != self.experts:
            raise ConfigError(
                f"shape: ep is {self.ep}, but {self.experts} workers hold the experts; give that"
            )

    @classmethod
    def parse(cls, words: str) -> Shape:
        """Return the shape written as "tp8", "tp8-pp2-dcp8", "tp8-dp2-ep16" or "tp1-dp2-experts1".

        Raises:
            ConfigError: the text does not have that form, or no instance can have that shape.
        """
        match = _WORDS.fullmatch(words)
        if match is None:
            raise ConfigError(
                f"shape: {words!r} is not tpN, with -ppN, -dcpN, -dpN and -epN behind it where "
                "those are not 1 (e.g. tp8, tp8-dcp8, tp8-pp2-dcp8, tp8-dp2-ep16)"
            )
        tp, pp, dcp, dp, ep = (int(number or 1) for number in match.groups()[:-1])
        experts = int(match.groups()[-1] or 0)
        return cls(tp=tp, pp=pp, dcp=dcp, dp=dp, ep=ep if ep > 1 else experts or 1, experts=experts)

    def __str__(self) -> str:
        if self.experts:
            return f"tp{self.tp}" + f"-dp{self.dp}" * (self.dp > 1) + f"-experts{self.experts}"
        others = ("pp", self.pp), ("dcp", self.dcp), ("dp", self.dp), ("ep", self.ep)
        return f"tp{self.tp}" + "".join(f"-{name}{size}" for name, size in others if size > 1)

    @property
    def flags(self) -> str:
        """The shape as flags of `mooncake serve`."""
        others = (PP_FLAG, self.pp), (DCP_FLAG, self.dcp), (DP_FLAG, self.dp)
        given = [f" --{flag} {size}" for flag, size in others if size > 1]
        shares = f" --{EP_FLAG}" * (self.ep > 1 or self.experts > 0)
        apart = f" --{EXPERTS_FLAG} {self.experts}" if self.experts else ""
        return f"--{TP_FLAG} {self.tp}{''.join(given)}{shares}{apart}"

    @property
    def num_ranks(self) -> int:
        """The number of all ranks of the instance."""
        return self.tp * self.pp

    @property
    def num_sharers(self) -> int:
        """The number of workers that hold the experts together or use them, and step together."""
        return self.dp + self.experts

    def stage_of(self, rank: int) -> int:
        """Return the stage of `rank`; the stage with the first layers is 0."""
        return self.pp - 1 - rank // self.tp

    def ranks_of(self, stage: int) -> range:
        """Return the ranks of a stage, in the order of their parts of each layer."""
        first = (self.pp - 1 - stage) * self.tp
        return range(first, first + self.tp)


def stage_layers(num_layers: int, pp: int) -> list[range]:
    """Return the layers of each stage, first stage first.

    When the layers do not divide evenly, the middle stages get one more first, then the first
    stage, never the last. The ends also hold the embedding and the head, and the first layers are
    small.

    Raises:
        ConfigError: a stage would have no layer.
    """
    if pp > num_layers:
        raise ConfigError(
            f"{PP_FLAG}: each of {pp} stages needs a layer, and this model has {num_layers}; give "
            f"at most {num_layers}"
        )
    each, rest = divmod(num_layers, pp)
    larger = [*range(1, pp - 1), 0, pp - 1][:rest]
    found, first = [], 0
    for stage in range(pp):
        stop = first + each + (stage in larger)
        found.append(range(first, stop))
        first = stop
    return found


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))

"""Kimi-K2 (DeepSeek-V3's architecture) as a forward pass over paged latent KV.

The only state is the weights; KV and sequences are passed in. `loading` makes a model from a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from mooncake.base import ModelSpec
from mooncake.engine.expert_placement import EplbConfig
from mooncake.model.expert_balancing import ExpertBalancer
from mooncake.model.inputs import PrefersAbsorbed, Queries, StepInputs
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.linear import GatedMlp, Product
from mooncake.model.layers.mla import Mla
from mooncake.model.layers.moe import ExpertSlots, Moe
from mooncake.model.layers.rows import Embedding, Head, RmsNorm, Rope
from mooncake.model.parallel.exchange import ExpertRanks
from mooncake.model.parallel.group import Group
from mooncake.model.parallel.stages import Stage


class ReadStates:
    """The states that a layer that drafts reads, of the rows of one step: the inputs of some layers
    of the model, [rows, hidden] each. A forward pass gives them; where
    stages share the layers, they go on to the next stage with the activations.
    """

    def __init__(self, layers: tuple[int, ...], into: torch.Tensor | None = None) -> None:
        """layers: the layers whose inputs are read, in order; the number of layers stands for the
        output of the last one. into: [layers, rows, hidden], where they are written; None: they
        are kept as they come.
        """
        self.layers = layers
        self._into = into
        self.found: list[torch.Tensor] = []
        """What has come so far, in order."""

    def __call__(self, layer: int, states: torch.Tensor) -> None:
        """Keep the input of one of `layers`. It comes in order, and is not overwritten."""
        if self._into is None:
            self.found.append(states)
        else:
            self._into[self.layers.index(layer)].copy_(states)

    def take(self, states: Sequence[torch.Tensor]) -> None:
        """Keep what the stage before has found."""
        self.found += states

    def num_before(self, layer: int) -> int:
        """Return how many of the layers come before `layer`."""
        return sum(each < layer for each in self.layers)

    @property
    def rows(self) -> torch.Tensor:
        """The states [rows, read width], in the order of the step's rows."""
        return self.found[0] if len(self.found) == 1 else torch.cat(self.found, dim=-1)


class Layer:
    """One decoder layer: attention and a dense or expert layer, each normed first and added.

    A layer turns hidden states into (x, update). Where the backend fuses, the next norm adds the
    two; otherwise `update` is None.
    """

    def __init__(
        self, attention: Mla, output_norm: RmsNorm, mlp: GatedMlp | Moe, *, fused: bool = False
    ) -> None:
        """fused: see `Backends.fuses`."""
        self._attention = attention
        self._output_norm = output_norm
        self._mlp = mlp
        self._fused = fused
        self.takes = attention.takes
        self.prepare_context = attention.prepare_context
        self.write_kv = attention.write_kv

    @property
    def moe(self) -> Moe | None:
        """The layer's experts, or None if it is a dense layer."""
        return self._mlp if isinstance(self._mlp, Moe) else None

    def prepare(self, rows: int, most_rows: int) -> None:
        """Let a library build its code for steps of `rows` rows, at most `most_rows`."""
        self._attention.prepare(rows)
        if isinstance(self._mlp, Moe):
            self._mlp.prepare(rows, most_rows)
        else:
            self._mlp.prepare(rows)

    def serve(self, x: torch.Tensor) -> None:
        """Compute what rows of other ranks need from this one; x: [0, hidden]."""
        if isinstance(self._mlp, Moe):
            self._mlp.serve(x)

    def in_one(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        places: torch.Tensor,
        queries: Queries,
        kv: KvTensors,
    ) -> torch.Tensor:
        """Return the layer's output for all rows, whose KV is written. Requires `takes`."""
        x = self._attention.in_one(x, rotation, places, queries, kv)
        return self._mlp.add(self._output_norm(x), x)

    def finish(
        self,
        x: torch.Tensor,
        query: torch.Tensor,
        rotation: torch.Tensor,
        queries: Queries,
        kv: KvTensors,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output for the rows of `queries`. The other arguments belong to these
        rows.
        """
        if self._fused:
            attended = self._attention.attend(query, rotation, queries, kv)
            normed, x = self._output_norm.of_sum(x, attended)
            return x, self._mlp(normed)
        x = self._attention.attend_and_add(query, rotation, queries, kv, x)
        return self._mlp.add(self._output_norm(x), x), None


class Output:
    """Makes logits from hidden states: a norm and the vocabulary head."""

    def __init__(self, norm: RmsNorm, head: Head) -> None:
        self.norm = norm
        self.head = head
        self.prepare = head.prepare

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return [rows, vocab] float32 for `hidden` [rows, hidden], in `out` if it is given."""
        return self.head(self.norm(hidden), out)


class MtpLayer:
    """DeepSeek-V3's MTP layer (arXiv 2412.19437 section 2.2). From a token and the normed state of
    the token before it, it makes the normed state with which the head guesses the next token.
    """

    def __init__(
        self,
        token_norm: RmsNorm,
        state_norm: RmsNorm,
        product: Product,
        layer: Layer,
        norm: RmsNorm,
    ) -> None:
        """`product`: the product of both normed inputs, the token first."""
        self._token_norm = token_norm
        self._state_norm = state_norm
        self._product = product
        self.layer = layer
        self.norm = norm

    def join(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the layer's input, [rows, hidden], from embedded tokens and states of the same
        shape.
        """
        return self._product(
            torch.cat((self._token_norm(embedded), self._state_norm(states)), dim=-1)
        )


class KimiK2:
    """The model, or one stage of it. Two threads must not use it at once on the same KV pages."""

    def __init__(
        self,
        spec: ModelSpec,
        placed: torch.Tensor,
        embedding: Embedding | None,
        layers: list[Layer],
        output: Output | None,
        rope: Rope,
        prefers_absorbed: PrefersAbsorbed,
        stage: Stage,
        context: Group | None = None,
        sharing: ExpertRanks | None = None,
        eplb: EplbConfig | None = None,
        mtp: MtpLayer | None = None,
        moes: list[Moe | None] | None = None,
    ) -> None:
        """placed: a tensor of the device and dtype to compute with. layers, embedding, output: the
        parts that `stage` has. prefers_absorbed: says which form of attention new tokens take.
        context: the ranks that share out the KV of every context; None: each has all. sharing: the
        ranks that share out the routed experts; None: each has all. eplb: when experts are placed
        anew. mtp: the layer that guesses tokens, with KV of its own after that of the layers; None:
        there is none. moes: all that a rank has which holds routed experts and nothing else, in
        place of `layers`; None for a dense layer.
        """
        self.spec = spec
        self.prefers_absorbed = prefers_absorbed
        self.device = placed.device
        self.dtype = placed.dtype
        self.stage = stage
        self._placed = placed
        self._embedding = embedding
        self._layers = layers
        self._moes = [layer.moe for layer in layers] if moes is None else moes
        self._output = output
        self._rope = rope
        self._context = context
        self.mtp = mtp
        self.exchange = None if sharing is None else sharing.exchange
        self.balancer = None
        if sharing is not None:
            self.balancer = ExpertBalancer(self.expert_slots, sharing, eplb)

    def connect(self) -> None:
        """Connect to the stages beside this one (see `Stage.connect`)."""
        self.stage.connect(self._placed.new_zeros(1, self.spec.hidden_size))

    def between_steps(self) -> None:
        """Do the work between steps, which belongs to no step, not even a captured one. All ranks
        call this alike.
        """
        if self.balancer is not None:
            self.balancer.between_steps()

    def forward(
        self,
        inputs: StepInputs,
        kv: KvTensors,
        after_write: Callable[[int], None] | None = None,
        read: ReadStates | None = None,
    ) -> torch.Tensor:
        """Return the final hidden states of the output rows, [rows, hidden], before the last norm.
        A stage before the last returns the states of all rows, which go to the next stage.

        Writes the KV of all rows. All ranks that share a layer's KV call `after_write(layer)` as
        soon as it and all layers' before it are written. `read` gets the states that it reads, also
        those of the stages before. The last layer attends only for rows whose output is used.
        """
        stage, rows = self.stage, len(inputs.tokens)
        stage.begin()
        if self.exchange is not None:
            self.exchange.agree(rows, inputs.outputs.num_rows)
        x = None
        if not stage.is_first:
            num = 1 + (0 if read is None else read.num_before(stage.layers[0]))
            got = stage.receive(self._placed.new_empty(num * rows, self.spec.hidden_size))
            x, *states = got.chunk(num)
            if read is not None:
                read.take(states)
            if after_write is not None:
                after_write(stage.layers[0] - 1)
        x = self.compute(inputs, kv, x, after_write, read)
        if not stage.is_last:
            stage.send(x if read is None else torch.cat((x, *read.found)))
        return x

    def compute(
        self,
        inputs: StepInputs,
        kv: KvTensors,
        states: torch.Tensor | None,
        after_write: Callable[[int], None] | None = None,
        read: ReadStates | None = None,
    ) -> torch.Tensor:
        """Return what this stage makes of the `states` that it got, which may be overwritten. The
        first stage gets None. Exchanges nothing with other stages. The rest is that of `forward`.
        """
        stage = self.stage
        x = self.embedded(inputs.tokens) if states is None else states
        update: torch.Tensor | None = None
        rotation = self._rope.rotation(inputs.positions)
        last = self.spec.num_hidden_layers - 1
        for number, layer in zip(stage.layers, self._layers, strict=True):
            stage.go_on()
            if read is not None and number in read.layers:
                read(number, x.clone() if update is None else x + update)
            queries = inputs.queries if number < last else inputs.outputs
            if number == last and self.exchange is not None:
                self.exchange.in_last_layer()
            written = None if after_write is None else partial(after_write, number)
            x, update = self._through(
                layer, (x, update), rotation, inputs.places, queries, kv, written
            )
        if update is not None:
            x = x.add_(update)
        if stage.is_last and read is not None and last + 1 in read.layers:
            read(last + 1, x)
        return x

    def _through(
        self,
        layer: Layer,
        hidden: tuple[torch.Tensor, torch.Tensor | None],
        rotation: torch.Tensor,
        places: torch.Tensor,
        queries: Queries,
        kv: KvTensors,
        after_write: Callable[[], None] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a layer's output for the rows of `queries`, from the output of the layer before;
        see `forward` and `Layer`.
        """
        x, update = hidden
        if update is None and queries.rows is None and layer.takes(queries, kv):
            x = layer.in_one(x, rotation, places, queries, kv)
            if after_write is not None:
                after_write()
            return x, None
        query, x = layer.write_kv(x, update, rotation, places, kv)
        update = None
        if after_write is not None and self._context is None:
            after_write()
        if queries.rows is not None:
            x, query, rotation = (
                part.index_select(0, queries.rows) for part in (x, query, rotation)
            )
        if queries.num_rows:
            x, update = layer.finish(x, query, rotation, queries, kv)
        else:
            layer.serve(x)
            if self._context is not None:
                self._context.meet()
        if after_write is not None and self._context is not None:
            after_write()  # all ranks wrote their KV before they met in this layer
        return x, update

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [rows, hidden] of `tokens` [rows] int64. Only the first stage has the
        embedding.
        """
        assert self._embedding is not None
        return self._embedding(tokens)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normed states of `forward`'s result, or of some of its rows."""
        assert self._output is not None
        return self._output.norm(hidden)

    def guess(self, inputs: StepInputs, states: torch.Tensor, kv: KvTensors) -> torch.Tensor:
        """Return the MTP layer's states of the output rows, [rows, hidden]. Writes its KV of all
        rows. Requires `mtp`.

        states: the state of the token before each of `inputs.tokens`, from the model or from this
        layer.
        """
        assert self.mtp is not None
        x = self.mtp.join(self.embedded(inputs.tokens), states)
        rotation = self._rope.rotation(inputs.positions)
        layer = self.mtp.layer
        made = self._through(layer, (x, None), rotation, inputs.places, inputs.outputs, kv, None)
        return self.mtp.norm.of_sum(*made)[0]

    def likeliest(self, states: torch.Tensor) -> torch.Tensor:
        """Return the likeliest token after each of these states, int64 [rows]."""
        assert self._output is not None
        return self._output.head(states).argmax(dim=-1)

    def serve(self) -> None:
        """Take part in a step of other ranks in which this rank has no rows."""
        self.between_steps()
        self.serve_pass()

    def serve_pass(self) -> None:
        """Take part in a forward pass of other ranks in which this rank has no rows."""
        assert self.exchange is not None, "this rank shares no experts"
        self.exchange.agree(0, 0)
        self.serve_agreed()

    def serve_agreed(self) -> None:
        """Compute experts for other ranks in a step that has been agreed on."""
        assert self.exchange is not None, "this rank shares no experts"
        none = self._placed.new_empty(0, self.spec.hidden_size)
        for number, moe in zip(self.stage.layers, self._moes, strict=True):
            if number == self.spec.num_hidden_layers - 1:
                self.exchange.in_last_layer()
            if moe is not None:
                moe.serve(none)

    @property
    def expert_slots(self) -> list[ExpertSlots]:
        """The routed experts of each layer that has some, if ranks share them out."""
        return [moe.slots for moe in self._moes if moe is not None and moe.slots is not None]

    @property
    def has_rest(self) -> bool:
        """False if this rank holds routed experts and nothing else."""
        return bool(self._layers)

    @property
    def counters(self) -> dict[str, float]:
        """The counts of experts since the start, by name, if ranks share the experts."""
        return {} if self.balancer is None else dict(self.balancer.counters)

    def kinds_of_layers(self) -> list[Layer]:
        """Return a layer of each kind: a dense one first, then one with experts."""
        return list(dict.fromkeys((self._layers[0], self._layers[-1])))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return [rows, vocab] float32 for `forward`'s result, or some of its rows, in `out` if it
        is given. Only the last stage makes logits.
        """
        assert self._output is not None, "a stage before the last makes no logits"
        return self._output(hidden, out)

    def prepare_head(self, rows: int) -> None:
        """Let a library build its code for logits of `rows` rows."""
        if self._output is not None:
            self._output.prepare(rows)

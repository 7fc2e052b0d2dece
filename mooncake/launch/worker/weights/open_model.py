"""Makes a model that is not loaded yet from settings, and starts the processes of its other
ranks.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake.launch.host.interfaces import LOOPBACK, bind_nccl
from mooncake.launch.host.processes.start_phases import importing
from mooncake.launch.host.secrets.key_source import read_keys
from mooncake.model.options import ModelOptions

if TYPE_CHECKING:
    from mooncake.launch.worker.ranks.far_ranks import FarStages
    from mooncake.launch.worker.weights.borrowed_weights import BorrowedWeights
    from mooncake.model.checkpoint.files.signature import Signature
    from mooncake.model.opening import ModelSource
    from mooncake.model.parallel.peers import Peers


def read_weights(
    path: str, options: ModelOptions, borrowed: BorrowedWeights | None = None
) -> tuple[Signature, str]:
    """Return what a checkpoint has in common with those that can replace it, and the revision of
    its weights. Files that were not hashed before are hashed. `borrowed` weights are used in place
    of those there.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: the key of encrypted weights is missing.
    """
    with importing():
        from mooncake.model import opening

    lent = None if borrowed is None else borrowed.files
    return opening.read_weights(Path(path), read_keys(options.weights_key), options.cache_dir, lent)


def open_model(
    path: str,
    dtype: str,
    options: ModelOptions | None = None,
    peers: Peers | None = None,
    far: FarStages | None = None,
    borrowed: BorrowedWeights | None = None,
) -> ModelSource:
    """Return the checkpoint at `path`, with weights not loaded yet; `borrowed` ones are used in
    place of those there. If there are several ranks, the others begin to load in their own
    processes. `peers`: the instances with which it shares its experts; the model owns their links
    from now on. `far`: where the stages on other machines are. The first call imports torch.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: this machine lacks what the options ask for, or the key of encrypted weights is
            missing.
    """
    with importing():
        from mooncake.model.opening import ModelSource

    options = options or ModelOptions()
    keys = read_keys(options.weights_key)
    lent = None if borrowed is None else borrowed.files
    lead = None
    if options.group_kind == "nccl" and (options.shape.num_ranks > 1 or peers is not None):
        bind_nccl(LOOPBACK if far is None else far.own_host)
    with contextlib.ExitStack() as opened:
        if peers is not None:
            opened.callback(peers.close)
        if options.shape.num_ranks > 1:
            from mooncake.launch.worker.ranks.rank_processes import start_ranks

            loan = None if borrowed is None else borrowed.loan
            lead = start_ranks(path, dtype, options, peers, far, loan)
            opened.callback(lead.close)
        source = ModelSource(Path(path), dtype, options, keys, lead, peers, lent)
        opened.pop_all()
    return source

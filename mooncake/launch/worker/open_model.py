"""From settings to a model that is not loaded yet, with the processes of its other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mooncake.launch.host.importing import importing
from mooncake.launch.host.key_source import read_keys
from mooncake.model.options import ModelOptions

if TYPE_CHECKING:
    from mooncake.launch.worker.far_ranks import FarStages
    from mooncake.model.opening import ModelSource
    from mooncake.model.parallel.peers import Peers


def open_model(
    path: str,
    dtype: str,
    options: ModelOptions | None = None,
    peers: Peers | None = None,
    far: FarStages | None = None,
) -> ModelSource:
    """Return the checkpoint at `path`, weights not loaded yet; of several ranks, the others load
    in processes of their own from now on. `peers`: the instances with which it shares its experts,
    whose links are the model's from now on. `far`: where stages are that are not on this machine.
    The first call imports torch.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: the options ask for what this machine does not have, or the key of encrypted
            weights is not here.
    """
    with importing():
        from mooncake.model.opening import ModelSource

    options = options or ModelOptions()
    keys = read_keys(options.weights_key)
    if options.shape.num_ranks == 1:
        return ModelSource(Path(path), dtype, options, keys, peers=peers)
    from mooncake.launch.worker.rank_processes import start_ranks

    lead = start_ranks(path, dtype, options, peers, far)
    try:
        return ModelSource(Path(path), dtype, options, keys, lead, peers)
    except BaseException:
        lead.close()
        raise

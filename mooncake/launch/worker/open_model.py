"""Makes a model that is not loaded yet from settings, and starts the processes of its other
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mooncake.launch.host.importing import importing
from mooncake.launch.host.key_source import read_keys
from mooncake.model.options import ModelOptions

if TYPE_CHECKING:
    from mooncake.launch.worker.far_ranks import FarStages
    from mooncake.model.checkpoint.files.checkpoint_files import LentFiles
    from mooncake.model.checkpoint.files.signature import Signature
    from mooncake.model.opening import ModelSource
    from mooncake.model.parallel.peers import Peers


def read_weights(path: str, options: ModelOptions) -> tuple[Signature, str]:
    """Return what a checkpoint has in common with those that can replace it, and the revision of
    its weights. Files that were not hashed before are hashed.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: the key of encrypted weights is missing.
    """
    with importing():
        from mooncake.model import opening

    return opening.read_weights(Path(path), read_keys(options.weights_key), options.cache_dir)


def open_model(
    path: str,
    dtype: str,
    options: ModelOptions | None = None,
    peers: Peers | None = None,
    far: FarStages | None = None,
    lent: LentFiles | None = None,
) -> ModelSource:
    """Return the checkpoint at `path`, with weights not loaded yet; `lent` ones are used in place
    of those there. If there are several ranks, the
    others begin to load in their own processes. `peers`: the instances with which it shares its
    experts; the model owns their links from now on. `far`: where the stages on other machines are.
    The first call imports torch.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: this machine lacks what the options ask for, or the key of encrypted weights is
            missing.
    """
    with importing():
        from mooncake.model.opening import ModelSource

    options = options or ModelOptions()
    keys = read_keys(options.weights_key)
    if options.shape.num_ranks == 1:
        return ModelSource(Path(path), dtype, options, keys, peers=peers, lent=lent)
    from mooncake.launch.worker.rank_processes import start_ranks

    lead = start_ranks(path, dtype, options, peers, far)
    try:
        return ModelSource(Path(path), dtype, options, keys, lead, peers)
    except BaseException:
        lead.close()
        raise

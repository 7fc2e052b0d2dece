"""RDMA by the kernel's verbs, through pyverbs: the only module that imports it.

It uses reliable connections with one-sided READ and WRITE between registered memory: no copy here,
no code on the other side. pyverbs comes from PyPI or from Debian's python3-pyverbs, which lies
outside virtual environments and is looked for there.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mooncake.base.errors import ConfigError, TransferError
from mooncake.transfer.rdma.nic import Completion, Outcome, WorkRequest
from mooncake.transfer.rdma.wire import NicAddress, PairAddress
from mooncake.transfer.topology import PortFacts, gid_to_use, list_rdma_devices, read_ports

DISTRIBUTION_PACKAGES = "/usr/lib/python3/dist-packages"
_MODULES = ("addr", "cq", "device", "enums", "mr", "pd", "pyverbs_error", "qp", "wr")
_EVENT_LINK = "anon_inode:[infinibandevent]"
_DEPTH = 128
_INLINE_BYTES = 64
_CQ_DEPTH = 2**17 - 1
"""Completions that each NIC's queue holds, if the device allows as many."""
_POLL_AT_ONCE = 64
_TIMEOUT_CODE = 14
"""A packet is sent again after 4.096 us * 2**14 = 67 ms without an answer."""
_RETRIES = 7
"""After this many tries the path counts as broken: about half a second in all."""


class Verbs:
    """The modules of pyverbs. Raises ConfigError, which says how to install pyverbs, if it is
    missing.
    """

    def __init__(self) -> None:
        _find_pyverbs()
        try:
            loaded = {name: importlib.import_module(f"pyverbs.{name}") for name in _MODULES}
        except ImportError as error:
            raise ConfigError(
                f"RDMA needs pyverbs, which cannot be loaded here ({error}). Install it with "
                "'pip install pyverbs' (needs libibverbs-dev and a C compiler) or 'apt-get install "
                "python3-pyverbs' (for the distribution's own Python version), or choose "
                "`transport` tcp"
            ) from error
        self.addr, self.cq, self.device, self.enums = (loaded[name] for name in _MODULES[:4])
        self.mr, self.pd, self.pyverbs_error, self.qp, self.wr = (
            loaded[name] for name in _MODULES[4:]
        )

    @property
    def error(self) -> type[Exception]:
        """The class of the exceptions that calls raise."""
        root: type[Exception] = self.pyverbs_error.PyverbsError
        return root


def _find_pyverbs() -> None:
    """Make the distribution's package importable without the rest of its folder."""
    if "pyverbs" in sys.modules or importlib.util.find_spec("pyverbs") is not None:
        return
    spec = importlib.machinery.PathFinder.find_spec("pyverbs", [DISTRIBUTION_PACKAGES])
    if spec is not None and spec.loader is not None:
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules["pyverbs"] = module
        spec.loader.exec_module(module)


def has_pyverbs() -> bool:
    """Return whether pyverbs can be found, in this environment or as the distribution's package."""
    _find_pyverbs()
    return "pyverbs" in sys.modules or importlib.util.find_spec("pyverbs") is not None


def _event_descriptors() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry) == _EVENT_LINK:
                found.add(int(entry.name))
        except OSError:
            pass
    return found


@dataclass(frozen=True, kw_only=True)
class NicChoices:
    """Choices of the configuration, for cases where the defaults do not fit."""

    gid_index: int | None = None
    mtu_bytes: int | None = None
    traffic_class: int = 0
    service_level: int = 0


class VerbsNic:
    """A `Nic`: context, protection domain and completion queue of one port."""

    def __init__(self, verbs: Verbs, port: PortFacts, choices: NicChoices) -> None:
        """Open the device. Raises ConfigError when it cannot be used."""
        self._verbs = verbs
        self._port = port.port
        self._choices = choices
        self._open(port)
        self.inline_bytes = _INLINE_BYTES
        """Bytes of a WRITE that travel with its request; 0 if the provider refuses this many."""
        self.has_extended_posts = True
        """True if many requests take one doorbell; False where the provider has no such call."""

    def _open(self, port: PortFacts) -> None:
        verbs = self._verbs
        try:
            before = _event_descriptors()
            self._context = verbs.device.Context(name=port.device)
            (self._events_fd,) = opened = _event_descriptors() - before
            self._domain = verbs.pd.PD(self._context)
            self._channel = verbs.cq.CompChannel(self._context)
            (self._fd,) = _event_descriptors() - before - opened
            num_completions = min(_CQ_DEPTH, self._context.query_device().max_cqe)
            self._queue = verbs.cq.CQ(self._context, num_completions, None, self._channel, 0)
            self.address = self._read_address(port, self._choices)
            self._queue.req_notify()
        except (verbs.error, ValueError) as error:
            raise ConfigError(f"RDMA device {port.device} cannot be used: {error}") from error
        os.set_blocking(self._fd, False)
        os.set_blocking(self._events_fd, False)
        # Half as many: completions that a closed pair has left take room until they are read.
        self.max_pairs = max(1, num_completions // (2 * _DEPTH))
        self._is_open = True

    def _read_address(self, port: PortFacts, choices: NicChoices) -> NicAddress:
        attributes = self._context.query_port(port.port)
        index = choices.gid_index
        if index is None:
            index = gid_to_use(port)
        if index is None or index not in port.gids:
            raise ValueError(
                f"port {port.port} has no usable GID (asked: {choices.gid_index}; there are "
                f"{sorted(port.gids)}); RoCE v2 needs an IP address on the interface"
            )
        self.gid_index = index
        mtu = attributes.active_mtu
        if choices.mtu_bytes is not None:
            mtu = min(mtu, choices.mtu_bytes.bit_length() - 8)
        lid = 0 if port.ethernet else attributes.lid
        return NicAddress(port.device, port.gids[index][0], lid, mtu, port.ethernet)

    @property
    def depth(self) -> int:
        return _DEPTH

    def fileno(self) -> int:
        return self._fd

    def events_fileno(self) -> int:
        return self._events_fd

    def take_events(self) -> None:
        enums = self._verbs.enums
        fatal = {enums.IBV_EVENT_DEVICE_FATAL, enums.IBV_EVENT_CQ_ERR}
        failed = False
        try:
            while True:
                event = self._context.get_async_event()
                failed |= event.event_type in fatal
                event.ack()
        except self._verbs.error:
            pass
        if failed:
            raise TransferError(f"{self.address.name} reported that it failed")
        with contextlib.suppress(self._verbs.error, ValueError):  # without an address: the old one
            self.address = self._read_address(self._find_port(), self._choices)

    def _find_port(self) -> PortFacts:
        """Return the port to use. Raises ValueError when there is none."""
        for port in read_ports(self.address.name):
            if port.port == self._port:
                return port
        raise ValueError(f"{self.address.name} no longer has port {self._port}")

    def reopen(self) -> None:
        self.close()
        try:
            self._open(self._find_port())
        except (ConfigError, ValueError) as error:
            self.close()
            raise TransferError(str(error)) from error

    def is_active(self) -> bool:
        if not self._is_open:
            return False
        try:
            state = self._context.query_port(self._port).state
        except self._verbs.error:
            return False
        return bool(state == self._verbs.enums.IBV_PORT_ACTIVE)

    @property
    def _access(self) -> int:
        enums = self._verbs.enums
        return int(
            enums.IBV_ACCESS_LOCAL_WRITE
            | enums.IBV_ACCESS_REMOTE_READ
            | enums.IBV_ACCESS_REMOTE_WRITE
        )

    def _check_open(self) -> None:
        if not self._is_open:
            raise TransferError(f"{self.address.name} is lost")

    def register(self, address: int, num_bytes: int) -> VerbsRegistration:
        self._check_open()
        try:
            region = self._verbs.mr.MR(self._domain, num_bytes, self._access, address)
        except self._verbs.error as error:
            raise TransferError(
                f"{self.address.name} cannot register {num_bytes} bytes of memory: {error}; it has "
                "to be locked, so raise the limit ('ulimit -l unlimited')"
            ) from error
        return VerbsRegistration(self._verbs, region)

    def register_dmabuf(self, fd: int, offset: int, num_bytes: int) -> VerbsRegistration:
        self._check_open()
        try:
            # pyverbs gives the NIC the offset as the address.
            region = self._verbs.mr.DmaBufMR(
                self._domain, num_bytes, self._access, dmabuf=fd, offset=offset
            )
        except (self._verbs.error, AttributeError) as error:  # older releases do not have it
            raise TransferError(f"{self.address.name} cannot register a dmabuf: {error}") from error
        return VerbsRegistration(self._verbs, region)

    def new_pair(self) -> VerbsPair:
        self._check_open()
        try:
            return VerbsPair(self._verbs, self, *self._create_pair())
        except self._verbs.error as error:
            if self.inline_bytes:
                self.inline_bytes, self.has_extended_posts = 0, True
                return self.new_pair()
            raise TransferError(f"{self.address.name} cannot open a queue pair: {error}") from error

    def _create_pair(self) -> tuple[Any, bool]:
        """Return the pair, and whether it supports the faster extended way to post."""
        verbs, enums = self._verbs, self._verbs.enums
        capacity = verbs.qp.QPCap(
            max_send_wr=_DEPTH,
            max_recv_wr=1,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=self.inline_bytes,
        )
        wanted = {
            "qp_type": enums.IBV_QPT_RC,
            "scq": self._queue,
            "rcq": self._queue,
            "cap": capacity,
            "pd": self._domain,
        }
        if self.has_extended_posts:
            mask = enums.IBV_QP_INIT_ATTR_PD | enums.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
            ops = enums.IBV_QP_EX_WITH_RDMA_WRITE | enums.IBV_QP_EX_WITH_RDMA_READ
            extended = verbs.qp.QPInitAttrEx(**wanted, comp_mask=mask, send_ops_flags=ops)
            try:
                return verbs.qp.QPEx(self._context, extended), True
            except verbs.error:  # not every provider supports it
                self.has_extended_posts = False
        plain = verbs.qp.QPInitAttrEx(**wanted, comp_mask=enums.IBV_QP_INIT_ATTR_PD)
        return verbs.qp.QP(self._context, plain), False

    def pair_attributes(self, own: PairAddress, peer: PairAddress) -> Any:
        """Return the attributes that connect a pair of ours to `peer`."""
        verbs, enums = self._verbs, self._verbs.enums
        attributes = verbs.qp.QPAttr(port_num=self._port)
        attributes.qp_access_flags = enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE
        attributes.path_mtu = min(self.address.mtu, peer.nic.mtu)
        attributes.dest_qp_num = peer.number
        attributes.rq_psn, attributes.sq_psn = peer.psn, own.psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 16
        attributes.min_rnr_timer = 12
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = _TIMEOUT_CODE, _RETRIES, 7
        gid = ":".join(peer.nic.gid.hex()[at : at + 4] for at in range(0, 32, 4))
        route = verbs.addr.GlobalRoute(
            dgid=verbs.addr.GID(gid),
            sgid_index=self.gid_index,
            hop_limit=64,
            traffic_class=self._choices.traffic_class,
        )
        attributes.ah_attr = verbs.addr.AHAttr(
            gr=route,
            is_global=int(self.address.ethernet),
            dlid=peer.nic.lid,
            sl=self._choices.service_level,
            port_num=self._port,
        )
        return attributes

    def take_completions(self) -> list[Completion]:
        ended: list[Completion] = []
        while True:
            try:
                count, found = self._queue.poll(_POLL_AT_ONCE)
            except self._verbs.error as error:
                raise TransferError(
                    f"{self.address.name} cannot be asked for completions: {error}"
                ) from error
            ended += [
                Completion(
                    completion.wr_id, self._outcome(completion.status), str(completion.status)
                )
                for completion in found[:count]
            ]
            if count < _POLL_AT_ONCE:
                return ended

    def _outcome(self, status: int) -> Outcome:
        enums = self._verbs.enums
        known = {
            enums.IBV_WC_SUCCESS: Outcome.ARRIVED,
            enums.IBV_WC_WR_FLUSH_ERR: Outcome.FLUSHED,
            enums.IBV_WC_REM_ACCESS_ERR: Outcome.REFUSED,
            enums.IBV_WC_LOC_PROT_ERR: Outcome.LOCAL_MEMORY,
        }
        return known.get(status, Outcome.LINK)

    def arm(self) -> None:
        try:
            while True:
                self._channel.get_cq_event(self._queue)
                self._queue.ack_events(1)
        except self._verbs.error:  # no event is left: the descriptor does not block
            pass
        try:
            self._queue.req_notify()
        except self._verbs.error as error:
            raise TransferError(
                f"{self.address.name} cannot be asked for completions: {error}"
            ) from error

    def close(self) -> None:
        self._is_open = False
        for part in (self._queue, self._channel, self._domain, self._context):
            try:
                part.close()
            except self._verbs.error:  # a device that is gone frees nothing itself
                continue


class VerbsRegistration:
    """A `Registration`: one memory region of one protection domain."""

    def __init__(self, verbs: Verbs, region: Any) -> None:
        self._verbs = verbs
        self._region = region
        self.local_key: int = region.lkey
        self.remote_key: int = region.rkey

    def close(self) -> None:
        try:
            self._region.close()
        except self._verbs.error as error:
            raise TransferError(f"the NIC cannot release a memory region: {error}") from error


class VerbsPair:
    """A `QueuePair`."""

    def __init__(self, verbs: Verbs, nic: VerbsNic, pair: Any, extended: bool) -> None:
        self._verbs = verbs
        self._nic = nic
        self._pair = pair
        self._extended = extended
        self._inline_bytes = nic.inline_bytes
        self._element = verbs.wr.SGE(0, 0, 0)
        """Reused for every request: pyverbs frees none by itself."""
        self.address = PairAddress(nic.address, pair.qp_num, secrets.randbits(24))

    def serve(self, peer: PairAddress) -> None:
        self._modify(self._pair.to_rtr, peer)

    def connect(self, peer: PairAddress) -> None:
        self._modify(self._pair.to_rts, peer)

    def _modify(self, change: Any, peer: PairAddress) -> None:
        try:
            change(self._nic.pair_attributes(self.address, peer))
        except self._verbs.error as error:
            raise TransferError(
                f"{self.address.nic.name} cannot be connected to {peer.nic.name}: {error}"
            ) from error

    def post(self, requests: Sequence[WorkRequest]) -> None:
        try:
            if self._extended:
                self._post_extended(requests)
            else:
                for request in requests:
                    self._post_plain(request)
        except self._verbs.error as error:
            raise TransferError(
                f"{self.address.nic.name} did not take a request: {error}"
            ) from error

    def _flags(self, request: WorkRequest) -> tuple[int, bool]:
        enums = self._verbs.enums
        fits = request.num_bytes <= self._inline_bytes
        inline = request.in_host and request.is_write and fits
        signalled: int = enums.IBV_SEND_SIGNALED if request.signalled else 0
        return signalled | (enums.IBV_SEND_INLINE if inline else 0), inline

    def _post_extended(self, requests: Sequence[WorkRequest]) -> None:
        """Post all requests with one doorbell."""
        pair, element = self._pair, self._element
        pair.wr_start()
        for request in requests:
            flags, inline = self._flags(request)
            pair.wr_id, pair.wr_flags = request.work_id, flags
            if request.is_write:
                pair.wr_rdma_write(request.remote_key, request.remote_address)
            else:
                pair.wr_rdma_read(request.remote_key, request.remote_address)
            if inline:
                pair.wr_set_inline_data(request.local_address, request.num_bytes)
                continue
            element.addr, element.length = request.local_address, request.num_bytes
            element.lkey = request.local_key
            pair.wr_set_sge(element)
        pair.wr_complete()

    def _post_plain(self, request: WorkRequest) -> None:
        enums, element = self._verbs.enums, self._element
        flags, _inline = self._flags(request)
        element.addr, element.length = request.local_address, request.num_bytes
        element.lkey = request.local_key
        code = enums.IBV_WR_RDMA_WRITE if request.is_write else enums.IBV_WR_RDMA_READ
        work = self._verbs.wr.SendWR(
            wr_id=request.work_id,
            opcode=code,
            num_sge=1,
            sg=[element],
            send_flags=flags,
        )
        try:
            work.set_wr_rdma(request.remote_key, request.remote_address)
            self._pair.post_send(work)
        finally:
            work.close()

    def close(self) -> None:
        try:
            self._pair.close()
            self._element.close()
        except self._verbs.error as error:
            raise TransferError(f"a queue pair cannot be destroyed: {error}") from error


def open_nics(devices: Sequence[str], choices: NicChoices) -> list[VerbsNic]:
    """Return all active ports, or those of the named devices. Raises ConfigError.

    If a device has several active ports, the first is used.
    """
    verbs = Verbs()
    there = list_rdma_devices()
    missing = [name for name in devices if name not in there]
    if missing:
        raise ConfigError(
            f"this machine has no RDMA device {', '.join(missing)}; it has: "
            f"{', '.join(there) or 'none'}"
        )
    nics = []
    for device in devices or there:
        ports = [port for port in read_ports(device) if port.active]
        if not ports and devices:
            raise ConfigError(f"RDMA device {device} has no active port")
        nics += [VerbsNic(verbs, port, choices) for port in ports[:1]]
    if not nics:
        raise ConfigError("this machine has no RDMA device with an active port")
    return nics

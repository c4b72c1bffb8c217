"""The choices of a user about a node: frozen, and checked once, at construction.

``RpcBackendOptions`` has the fields that most programs set, and groups of the others (`MembershipOptions`,
`MemoryOptions`, `LimitOptions`, `ObservingOptions`, `TlsOptions`). Each owns its defaults, the environment variables
behind them and the values it allows. An argument wins over its environment variable, which wins over the default; both
are read when the object is made, so an options object that exists is complete and valid, and no other module reads
these variables. (Others are about the process, not about a node: ``FARCALL_CACHE``, ``FARCALL_SPEEDUPS``.)

Knows neither torch nor sockets: users of the options find out whether an address can be reached, or shared memory
works here. Long because the checks of all groups share their forms.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from farcall.secret import Secret, check_secret

DEFAULT_RPC_TIMEOUT_S: Final = 60.0
DEFAULT_INIT_METHOD: Final = "env://"
DEFAULT_NUM_WORKER_THREADS: Final = 16
DEFAULT_START_TIMEOUT_S: Final = 60.0
DEFAULT_BUSY_WAIT_S: Final = 150e-6

ENV_ADVERTISE: Final = "FARCALL_ADVERTISE"
ENV_ALLOWED: Final = "FARCALL_ALLOWED"
ENV_SECRET: Final = "FARCALL_SECRET"
ENV_SECRET_FILE: Final = "FARCALL_SECRET_FILE"
ENV_TLS: Final = "FARCALL_TLS"
ENV_TLS_FILES: Final = ("FARCALL_TLS_CA", "FARCALL_TLS_CERT", "FARCALL_TLS_KEY")
ENV_TRANSPORTS: Final = "FARCALL_TRANSPORTS"
ENV_LOG: Final = "FARCALL_LOG"
ENV_CLUSTER_NAME: Final = "FARCALL_CLUSTER_NAME"
ENV_RUNTIME_DIRECTORY: Final = "FARCALL_RUNTIME_DIRECTORY"
ENV_METRICS_PORT: Final = "FARCALL_METRICS_PORT"
ENV_DASHBOARD_PORT: Final = "FARCALL_DASHBOARD_PORT"

WHEN_OVERLOADED: Final = ("wait", "fail")
TRANSPORTS: Final = ("unix", "tcp")
"""Every way for bytes between processes, the preferred one first."""

LOG_LEVELS: Final = ("info", "debug")
DeviceMaps = Mapping[str, Mapping[Any, Any]]
_DEVICE = re.compile(r"cpu|[a-z]+:\d+")
_HOST = re.compile(r"[A-Za-z0-9._\-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._\-]+)?")


class _Checked:
    """A frozen dataclass whose ``__post_init__`` checks its fields, and may put a better form in their place."""

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_each(self, check: Callable[[str, object], object], *names: str) -> None:
        for name in names:
            self._set(name, check(name, getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class MembershipOptions(_Checked):
    """How long silent members and broken connections are borne with.

    Args:
        reconnect_s: how long the host of a member may leave everything unanswered, connections and attempts to connect
            again, before it counts as gone. Meanwhile calls to it wait, within their timeouts, and nothing is lost or
            done twice. A process that is certainly gone is dead at once. 0: a broken connection is a death.
        probe_interval_s: every so often a member probes one other that has been quiet.
        probe_timeout_s: how long a probe waits for an answer before other members are asked to try.
        suspicion_s: how long a member may answer nobody before it is declared dead, if its host is gone, too. No member
            that answers within this time is.
        indirect_probes: how many members are asked whether they can reach one that does not answer.
        unresponsive_s: how long a member may answer nobody although its host answers, because it is busy or stopped,
            before it is declared dead. None: for ever; calls to it wait within their own timeouts.
        rejoin: whether this node, if the others declare it dead although it lives, joins again by itself, as a new
            member. If not, or where its place was given away, its calls go on to raise ``Expelled``.
    """

    reconnect_s: float = 10.0
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 0.5
    suspicion_s: float = 10.0
    indirect_probes: int = 3
    unresponsive_s: float | None = None
    rejoin: bool = True

    def __post_init__(self) -> None:
        self._check_each(_check_flag, "rejoin")
        self._set("reconnect_s", _check_seconds("reconnect_s", self.reconnect_s, "0 means never"))
        self._check_each(_check_some_seconds, "probe_interval_s", "probe_timeout_s", "suspicion_s")
        self._check_each(_check_positive, "indirect_probes")
        if self.unresponsive_s is not None:
            self._check_each(_check_some_seconds, "unresponsive_s")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(_Checked):
    """The memory that large tensors may travel through on one host.

    Args:
        shared_memory: whether large tensors may go through shared memory.
        shared_memory_limit_bytes: how much shared memory this node may hold for sending.
        device_sharing: whether other processes of this host may open device memory of this one; if not, or where that
            does not work, tensors on devices go through the host.
        device_views: tensors of 1 MiB and more that another process of this host sends are not copied out of its device
            memory, but lie there until they die; ``docs/gpu.md`` says what that means.
        device_memory_limit_bytes: how much device memory this node may hold for sending.
    """

    shared_memory: bool = True
    shared_memory_limit_bytes: int = 4 << 30
    device_sharing: bool = True
    device_views: bool = False
    device_memory_limit_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        self._check_each(_check_flag, "shared_memory", "device_sharing", "device_views")
        self._check_each(_check_positive, "shared_memory_limit_bytes", "device_memory_limit_bytes")


@dataclass(frozen=True, kw_only=True)
class LimitOptions(_Checked):
    """The bounds of the queues, and the fate of calls that meet one.

    Args:
        send_backlog_limit_bytes: unsent bytes a link may hold before its senders have to wait.
        max_queued_calls: how many calls of others may wait for a thread here. Beyond that their callers have to wait,
            or fail, as each of them chose. Calls that run, or have returned a future, do not count.
        when_overloaded: what a call made here does when it meets such a limit: ``"wait"``, unsent, for as long as its
            timeout allows, or ``"fail"`` at once with `Overloaded`. ``Retry`` calls again after that.
    """

    send_backlog_limit_bytes: int = 64 << 20
    max_queued_calls: int = 100_000
    when_overloaded: str = "wait"

    def __post_init__(self) -> None:
        self._check_each(_check_positive, "send_backlog_limit_bytes", "max_queued_calls")
        if self.when_overloaded not in WHEN_OVERLOADED:
            raise ValueError(f'when_overloaded must be "wait" or "fail", not {self.when_overloaded!r}')


@dataclass(frozen=True, kw_only=True)
class ObservingOptions(_Checked):
    """What a node shows of itself, and where.

    Args:
        cluster_name: what people call this cluster, in ``farcall top``, on the live page and for ``--cluster``.
            Default: ``FARCALL_CLUSTER_NAME``, else a number that farcall makes.
        observable: whether commands of the same user on this host (``farcall top``, ``farcall stacks``) find this node,
            by a file that only this user may read. With the cluster's secret it can be observed in any case.
        runtime_directory: where those files are. Default: ``FARCALL_RUNTIME_DIRECTORY``, else ``farcall`` in
            ``XDG_RUNTIME_DIR``, else ``farcall-<user number>`` in the directory for temporary files.
        metrics_port: serve metrics there in Prometheus' text format; 0 lets the system choose. Needs
            ``pip install 'farcall[metrics]'``. Default: ``FARCALL_METRICS_PORT``, else none are served.
        metrics_host: the address to serve them on. Where it is not loopback and there are certificates (``tls``), over
            TLS, to clients with one of the same authority; else to everybody.
        dashboard_port: serve the live page there; 0 lets the system choose. Default: ``FARCALL_DASHBOARD_PORT``, else
            this node does not serve it; ``farcall dashboard`` can at any time.
        dashboard_host: the address to serve it on. Where that is not loopback, over TLS only (``tls``, with
            certificates), at an address with a secret in it: ``node.dashboard_url``.
        opentelemetry: make a span of each call made and served, with OpenTelemetry's API and the tracer provider that
            the program has set up; the callee's spans are children of the caller's.
        log: ``"info"`` or ``"debug"``, perhaps with ``:`` and a file, to have farcall log there (else to stderr) by
            itself. Default: ``FARCALL_LOG``, else farcall logs through ``logging`` only, as a library should.
    """

    observable: bool = True
    cluster_name: str | None = None
    runtime_directory: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    dashboard_port: int | None = None
    dashboard_host: str = "127.0.0.1"
    opentelemetry: bool = False
    log: str | None = None

    def __post_init__(self) -> None:
        self._check_each(_check_flag, "observable", "opentelemetry")
        for name, variable in (("runtime_directory", ENV_RUNTIME_DIRECTORY), ("cluster_name", ENV_CLUSTER_NAME)):
            text = _from_environment(getattr(self, name), variable)
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{name} must be a str, not {type(text).__name__}")
            self._set(name, text)
        for name, variable in (("metrics_port", ENV_METRICS_PORT), ("dashboard_port", ENV_DASHBOARD_PORT)):
            chosen = _from_environment(getattr(self, name), variable)
            self._set(name, _check_port(f"{name} (or {variable})", chosen))
        self._set("log", _check_log(_from_environment(self.log, ENV_LOG)))


@dataclass(frozen=True, kw_only=True)
class TlsOptions(_Checked):
    """Connections over TCP are encrypted, and both ends show a certificate (TLS 1.3).

    Args:
        ca: a file with the certificate of the authority that has signed those of all members (PEM).
        certificate: a file with this node's certificate.
        key: a file with its private key.
        check_hosts: the certificate of a member must name the host, or the address, that is dialled.
        bind_names: the certificate of a worker must also have the worker's name among its own.
        from_secret: no certificates: the cluster's secret is the key. Needs Python 3.13.

    ``farcall certificates`` makes such files. They are read again when they change.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""
    check_hosts: bool = True
    bind_names: bool = False
    from_secret: bool = False

    def __post_init__(self) -> None:
        self._check_each(_check_flag, "check_hosts", "bind_names", "from_secret")
        for name in ("ca", "certificate", "key"):
            path = getattr(self, name)
            if not isinstance(path, str | os.PathLike):
                raise TypeError(f"{name} of TlsOptions must be a path, not {path!r}")
            self._set(name, os.fspath(path))
        if self.from_secret:
            if any(self.files) or self.bind_names:
                raise ValueError(
                    "TlsOptions(from_secret=True) uses no certificates: leave out the files and bind_names"
                )
            return
        for name, path in zip(("ca", "certificate", "key"), self.files, strict=True):
            if not path:
                raise ValueError(f"TlsOptions needs {name}, a file (`farcall certificates` makes all three)")
            if not os.path.isfile(path):
                raise ValueError(f"{name} of TlsOptions: the file {path} does not exist")

    @property
    def files(self) -> tuple[str, str, str]:
        """The three files."""
        return self.ca, self.certificate, self.key


@dataclass(frozen=True)
class RpcBackendOptions(_Checked):
    """How a node finds its peers, talks to them, and how much it may use.

    Args:
        rpc_timeout: seconds a call may take unless it says otherwise; None, or torch's 0, means without limit.
        init_method: where the members meet: ``env://``, ``tcp://host:port`` or ``file:///path``. For a group without
            a fixed size also ``farcall://host:port``, the address of any member: that needs no store.
        num_worker_threads: threads kept ready for user functions; more are started when all of them
            wait for nested calls.
        start_timeout_s: how long ``init_rpc`` waits for the other members. Default: 60 s, or
            ``rpc_timeout`` where that is longer (a short call timeout says nothing about
            how long processes take to start).
        advertise: host name or IP address, without a port, that this node tells the others.
            Default: ``FARCALL_ADVERTISE``, else the local address that reaches the store.
        port: where this node listens for members over TCP. Default: 0, the system chooses.
        secret: what every member must know to be let in, at least 16 random bytes; text counts as UTF-8.
            Default: ``FARCALL_SECRET``, else ``secret_file``, else a key of this user's on
            this machine: without a secret, members of other machines and other users are not met.
        secret_file: a file with the secret in it, or with two, one to a line, while it is being changed: the first is
            proved, both are let in. It is read again when it changes. Default: ``FARCALL_SECRET_FILE``.
        tls: `TlsOptions`, to encrypt connections over TCP. Default: ``FARCALL_TLS_CA``, ``FARCALL_TLS_CERT`` and
            ``FARCALL_TLS_KEY``, names of files; or ``FARCALL_TLS=secret``; else connections are proved, but not
            encrypted.
        allowed: ``"module:table"``, a dict with ``functions`` and ``classes``, as `farcall.allow` takes them: what
            others may call, create and unpickle here. Default: ``FARCALL_ALLOWED``, else everything.
        transports: which of ``"unix"`` and ``"tcp"`` may be used.
            Default: ``FARCALL_TRANSPORTS`` (comma separated), else both.
        device_maps: for each callee, from devices here to devices there: ``{"ps": {"cuda:0": "cuda:1"}}``. Devices are
            named, numbered (``0`` is ``"cuda:0"``) or ``torch.device``; also ``"cpu"``. Answers, and gradients, take
            the way back. Without a map a tensor on a device is not sent.
        devices: the devices that calls use here. Default: those that maps lead from or to.
        automatic_device_maps: every callee that has no map gets the identity: tensors on ``cuda:1`` go to ``cuda:1``.
        busy_wait_s: a thread that may expect to wait less than this looks for its news before it sleeps; it stops by
            itself where that does not pay. 0 means never.
        inherit: the calls of a function have at most the time that its caller has left, carry its metadata, and are
            cancelled with it. False: none of that, as in torch.distributed.rpc; running functions are not cancelled.
        membership: `MembershipOptions`, when a silent member is dead.
        memory: `MemoryOptions`, what large tensors travel through.
        limits: `LimitOptions`, how long queues may grow.
        observing: `ObservingOptions`, logs, metrics, the live page.

    Use ``options.replace(rpc_timeout=5)`` for a changed copy.
    """

    rpc_timeout: float | None = DEFAULT_RPC_TIMEOUT_S
    init_method: str = DEFAULT_INIT_METHOD
    num_worker_threads: int = field(default=DEFAULT_NUM_WORKER_THREADS, kw_only=True)
    start_timeout_s: float | None = field(default=None, kw_only=True)
    advertise: str | None = field(default=None, kw_only=True)
    port: int = field(default=0, kw_only=True)
    secret: str | bytes | None = field(default=None, kw_only=True, repr=False)
    secret_file: str | None = field(default=None, kw_only=True)
    tls: TlsOptions | None = field(default=None, kw_only=True)
    allowed: str | None = field(default=None, kw_only=True)
    transports: Sequence[str] | None = field(default=None, kw_only=True)
    device_maps: DeviceMaps = field(default_factory=dict, kw_only=True)
    devices: Sequence[Any] = field(default=(), kw_only=True)
    automatic_device_maps: bool = field(default=False, kw_only=True)
    busy_wait_s: float = field(default=DEFAULT_BUSY_WAIT_S, kw_only=True)
    inherit: bool = field(default=True, kw_only=True)
    membership: MembershipOptions = field(default_factory=MembershipOptions, kw_only=True)
    memory: MemoryOptions = field(default_factory=MemoryOptions, kw_only=True)
    limits: LimitOptions = field(default_factory=LimitOptions, kw_only=True)
    observing: ObservingOptions = field(default_factory=ObservingOptions, kw_only=True)

    def __post_init__(self) -> None:
        if self.rpc_timeout is not None:
            seconds = _check_seconds("rpc_timeout", self.rpc_timeout, "None means no limit")
            self._set("rpc_timeout", seconds or None)
        self._set("busy_wait_s", _check_seconds("busy_wait_s", self.busy_wait_s, "0 means never"))
        if self.start_timeout_s is not None:
            seconds = _check_seconds("start_timeout_s", self.start_timeout_s, "leave it out for the default")
            if seconds == 0:
                raise ValueError("start_timeout_s must be more than 0: init_rpc never waits without a bound")
            self._set("start_timeout_s", seconds)
        self._set("init_method", _check_init_method(self.init_method))
        self._check_each(_check_positive, "num_worker_threads")
        self._check_each(_check_flag, "automatic_device_maps", "inherit")
        for name, kind in _GROUPS.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be a farcall.{kind.__name__}, not {getattr(self, name)!r}")
        self._set("device_maps", _check_device_maps(self.device_maps))
        self._set("devices", tuple(_check_device(device) for device in self.devices))
        self._set("advertise", _check_advertise(_from_environment(self.advertise, ENV_ADVERTISE)))
        self._set("port", _check_port("port", self.port) or 0)
        secret, path = _choose_secret(self.secret, self.secret_file)
        self._set("secret", _check_secret(secret))
        self._set("secret_file", path)
        self._set("tls", _check_tls(_tls_from_environment() if self.tls is None else self.tls))
        self._set("allowed", _check_allowed(_from_environment(self.allowed, ENV_ALLOWED)))
        self._set("transports", _check_transports(_from_environment(self.transports, ENV_TRANSPORTS)))

    @property
    def start_deadline_s(self) -> float:
        """Seconds that ``init_rpc`` may take, the default worked out."""
        if self.start_timeout_s is not None:
            return self.start_timeout_s
        return max(DEFAULT_START_TIMEOUT_S, self.rpc_timeout or 0.0)

    @property
    def allowed_transports(self) -> tuple[str, ...]:
        """The transports that may be used, the preferred one first."""
        return TRANSPORTS if self.transports is None else tuple(self.transports)

    @property
    def has_secret(self) -> bool:
        """Was one given, or does this user's key stand in for it?"""
        return self.secret is not None or self.secret_file is not None

    def given_secret(self) -> Secret | None:
        """The configured secret, or None where this user's key stands in for one; reads its file."""
        if self.secret_file is not None:
            return Secret(path=self.secret_file)
        if self.secret is None:
            return None
        return Secret(self.secret.encode() if isinstance(self.secret, str) else self.secret)

    @property
    def names_devices(self) -> bool:
        """Do the options name devices? If not, none is ever looked at."""
        return bool(self.device_maps or self.devices or self.automatic_device_maps)

    def replace(self, **changes: Any) -> RpcBackendOptions:
        """Return a copy with ``changes`` made, checked like a new one."""
        return dataclasses.replace(self, **changes)


_GROUPS: Final = {
    "membership": MembershipOptions,
    "memory": MemoryOptions,
    "limits": LimitOptions,
    "observing": ObservingOptions,
}


def _from_environment(value: Any, variable: str) -> Any:
    """Return ``value``, or the variable's text where none was given; an empty variable is unset."""
    if value is None:
        return os.environ.get(variable) or None
    return value


def _choose_secret(secret: Any, path: Any) -> tuple[Any, str | None]:
    """The secret, or the file that it is in; where neither is given, from the environment."""
    in_environment = os.environ.get(ENV_SECRET) or None, os.environ.get(ENV_SECRET_FILE) or None
    if secret is None and path is None:
        secret, path = in_environment
        if secret is not None and path is not None:
            raise ValueError(f"{ENV_SECRET} and {ENV_SECRET_FILE} are both set: unset one of them")
    elif secret is not None and path is not None:
        # A copy that replaces one of them: the one from the environment yields.
        if path == in_environment[1]:
            path = None
        elif secret == in_environment[0]:
            secret = None
        else:
            raise ValueError("secret and secret_file are both given: leave one of them out")
    if path is not None:
        try:
            path = os.fspath(path)
            Secret(path=path)
        except ValueError as error:
            raise ValueError(f"secret_file (or {ENV_SECRET_FILE}): {error}") from error
    return secret, path


def _tls_from_environment() -> TlsOptions | None:
    files = [os.environ.get(variable) or "" for variable in ENV_TLS_FILES]
    way = os.environ.get(ENV_TLS) or ""
    if way and way != "secret":
        raise ValueError(f"{ENV_TLS} must be 'secret', not {way!r}; for certificates set {', '.join(ENV_TLS_FILES)}")
    if not any(files):
        return TlsOptions(from_secret=True) if way else None
    if way or not all(files):
        raise ValueError(f"set all of {', '.join(ENV_TLS_FILES)}, or {ENV_TLS} alone")
    return TlsOptions(ca=files[0], certificate=files[1], key=files[2])


def _check_tls(value: object) -> TlsOptions | None:
    if value is not None and not isinstance(value, TlsOptions):
        raise TypeError(f"tls must be a farcall.TlsOptions, not {value!r}")
    return value


def _check_seconds(name: str, value: object, remedy: str) -> float:
    if isinstance(value, timedelta):
        raise TypeError(f"{name} must be a number of seconds, not a timedelta: pass {value.total_seconds()!r}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    seconds = float(value) if abs(value) < sys.float_info.max else math.inf
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{name} must be a finite number of seconds, at least 0, not {value!r} ({remedy})")
    return seconds


def _check_some_seconds(name: str, value: object) -> float:
    seconds = _check_seconds(name, value, "a short one is allowed")
    if seconds == 0:
        raise ValueError(f"{name} must be more than 0: leave it out for the default")
    return seconds


def _check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def _check_positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value


def _check_port(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if not 0 <= value <= 65535:
        raise ValueError(f"{name} must be a port, 0 to 65535, not {value}")
    return value


def _check_log(value: object) -> str | None:
    """``value``, if it says how much to log and perhaps where."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"log must be a str, not {type(value).__name__}")
    level, colon, file = value.partition(":")
    if level not in LOG_LEVELS or (colon and not file):
        raise ValueError(
            f"log (or {ENV_LOG}) must be one of {', '.join(LOG_LEVELS)}, perhaps with a file as in 'info:/path', "
            f"not {value!r}"
        )
    return value


def _check_device(value: object) -> str:
    """The name of a device. Not torch's own parser: this module does not know torch."""
    if isinstance(value, bool) or not (isinstance(value, int | str) or hasattr(value, "type")):
        raise TypeError(f"a device must be a name, a number or a torch.device, not {value!r}")
    name = f"cuda:{value}" if isinstance(value, int) else str(value)
    if name == "cuda":
        name = "cuda:0"
    if not _DEVICE.fullmatch(name):
        raise ValueError(f"{value!r} is not a device: use 'cpu', 'cuda:0' or a number")
    return name


def _check_device_maps(value: object) -> dict[str, dict[str, str]]:
    if not isinstance(value, Mapping):
        raise TypeError(f"device_maps must be a dict of dicts, not {type(value).__name__}")
    maps: dict[str, dict[str, str]] = {}
    for peer, pairs in value.items():
        if not isinstance(peer, str) or not isinstance(pairs, Mapping):
            raise TypeError(f"device_maps must map names of workers to dicts of devices, not {peer!r} to {pairs!r}")
        maps[peer] = {_check_device(source): _check_device(target) for source, target in pairs.items()}
    return maps


def _check_init_method(value: object) -> str:
    """Check the url's form only: which schemes exist is torch's knowledge, and users may register more."""
    if not isinstance(value, str):
        raise TypeError(f"init_method must be a str, not {type(value).__name__}")
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"init_method {value!r} is not a url: {error}") from None
    if not parts.scheme or "://" not in value:
        raise ValueError(
            f"init_method {value!r} is not a url: use 'env://', 'tcp://host:port' or 'file:///path/of/a/new/file'"
        )
    if parts.scheme == "tcp" and (not parts.hostname or port is None):
        raise ValueError(f"init_method {value!r} lacks a host or a port: use 'tcp://host:port'")
    if parts.scheme == "file" and not parts.path:
        raise ValueError(f"init_method {value!r} lacks a path: use 'file:///path/of/a/new/file'")
    return value


def _check_advertise(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"advertise must be a str, not {type(value).__name__}")
    host = value.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not _HOST.fullmatch(host):
        raise ValueError(
            f"advertise (or {ENV_ADVERTISE}) must be a host name or IP address without a port, not {value!r}"
        )
    if host.count(":") == 1:
        raise ValueError(f"advertise (or {ENV_ADVERTISE}) takes no port: give only the host of {value!r}")
    return host


def _check_secret(value: object) -> str | bytes | None:
    if value is None:
        return None
    if not isinstance(value, str | bytes):
        raise TypeError(f"secret must be str or bytes, not {type(value).__name__}")
    check_secret(value.encode() if isinstance(value, str) else value, f"secret (or {ENV_SECRET})")
    return value


def _check_allowed(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"allowed must be a str, not {type(value).__name__}")
    module, _, table = value.partition(":")
    if not module or not table.isidentifier():
        raise ValueError(f"allowed (or {ENV_ALLOWED}) must name a table, as 'module:table', not {value!r}")
    return value


def _check_transports(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise TypeError(f"transports must be a sequence of names, not {type(value).__name__}")
    if not value or any(name not in TRANSPORTS for name in value):
        raise ValueError(
            f"transports (or {ENV_TRANSPORTS}) must be one or more of {', '.join(TRANSPORTS)}, not {list(value)!r}"
        )
    return tuple(name for name in TRANSPORTS if name in value)

"""The choices of a user about a node: frozen, and checked once, at construction.

``RpcBackendOptions`` has the fields that most programs set, and groups of the others (`MembershipOptions`,
`MemoryOptions`, `LimitOptions`, `ObservingOptions`, `TlsOptions`). Each owns its defaults, the environment variables
behind them and the values it allows. An argument wins over its environment variable, which wins over the default; both
are read when the object is made, so an options object that exists is complete and valid, and no other module reads
these variables. (Others are about the process, not about a node: ``FARCALL_CACHE``, ``FARCALL_SPEEDUPS``.)

Knows neither torch nor sockets: users of the options find out whether an address can be reached, or shared memory
works here. The forms that values may have, such as a number of seconds or a host, are in `option_checks.py`.

Over 400 lines: every option with what it means to a user.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from farcall import option_checks as check
from farcall.option_checks import TRANSPORTS
from farcall.secret import Secret, check_secret

DEFAULT_RPC_TIMEOUT_S: Final = 60.0
DEFAULT_INIT_METHOD: Final = "env://"
DEFAULT_NUM_WORKER_THREADS: Final = 16

ENV_ADVERTISE: Final = "FARCALL_ADVERTISE"
ENV_ALLOWED: Final = "FARCALL_ALLOWED"
ENV_SECRET: Final = "FARCALL_SECRET"
ENV_OBSERVERS_SECRET: Final = "FARCALL_OBSERVERS_SECRET"
ENV_SECRET_FILE: Final = "FARCALL_SECRET_FILE"
ENV_ENCRYPTION: Final = "FARCALL_ENCRYPTION"
ENV_TLS_FILES: Final = ("FARCALL_TLS_CA", "FARCALL_TLS_CERT", "FARCALL_TLS_KEY")
ENV_TRANSPORTS: Final = "FARCALL_TRANSPORTS"
ENV_LOG: Final = "FARCALL_LOG"
ENV_CLUSTER_NAME: Final = "FARCALL_CLUSTER_NAME"
ENV_RUNTIME_DIRECTORY: Final = "FARCALL_RUNTIME_DIRECTORY"
ENV_METRICS_PORT: Final = "FARCALL_METRICS_PORT"
ENV_DASHBOARD_PORT: Final = "FARCALL_DASHBOARD_PORT"


class _Checked:
    """A frozen dataclass whose ``__post_init__`` checks its fields, and may put a better form in their place."""

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check(self, form: Callable[[str, object], object], *names: str) -> None:
        """Check fields that must have a value."""
        for name in names:
            self._set(name, form(name, getattr(self, name)))

    def _check_or_look_up(self, form: Callable[[str, object], object], name: str, variable: str) -> None:
        """Check a field, or the variable in its place where it was left out. An empty variable is unset."""
        if getattr(self, name) is not None:
            self._check(form, name)
        elif value := os.environ.get(variable):
            self._set(name, form(variable, value))

    def _check_group(self, kind: type, name: str) -> None:
        if not isinstance(getattr(self, name), kind):
            raise TypeError(f"{name} must be a farcall.{kind.__name__}, not {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class MembershipOptions(_Checked):
    """Which silence of a member counts as a death, and which pairs of members keep a connection.

    Args:
        reconnect_s: how long the host of a member may leave everything unanswered, connections and attempts to connect
            again, before it counts as gone. Meanwhile calls to it wait, within their timeouts, and nothing is lost or
            done twice. A process that is certainly gone is dead at once. 0: a broken connection is a death.
        probe_interval_s: every so often a member probes one other that has been quiet.
        probe_timeout_s: how long a probe waits for an answer before other members are asked to try.
        suspicion_s: how long a member may answer nobody before it is declared dead, if its host is gone, too. A member
            that answers within this time never is.
        indirect_probes: how many members are asked whether they can reach one that does not answer.
        unresponsive_s: how long a busy or stopped member, whose host answers, may answer nobody before it is declared
            dead. None: for ever; calls to it wait within their own timeouts.
        rejoin: whether this node, if the others declare it dead although it lives, joins again by itself, as a new
            member. If not, or if another member has its place, its calls go on to raise ``Expelled``.
        return_s: how long a ``shutdown`` in a group of fixed size waits for a way back to the others, where the hosts
            of half the members or more fell silent: this node may be the one that is cut off. Then it raises.
        full_mesh: up to so many members, every pair keeps a connection. In a larger group each member keeps eight, and
            other pairs are connected while they need it. Give all members the same; more where some cannot be dialled.
    """

    reconnect_s: float = 10.0
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 0.5
    suspicion_s: float = 10.0
    indirect_probes: int = 3
    unresponsive_s: float | None = None
    rejoin: bool = True
    return_s: float = 60.0
    full_mesh: int = 32

    def __post_init__(self) -> None:
        self._check(check.flag, "rejoin")
        self._check(check.seconds, "reconnect_s", "return_s")
        self._check(check.some_seconds, "probe_interval_s", "probe_timeout_s", "suspicion_s")
        self._check(check.count, "indirect_probes", "full_mesh")
        if self.unresponsive_s is not None:
            self._check(check.some_seconds, "unresponsive_s")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(_Checked):
    """The memory that large tensors may travel through, and the engine that moves them between hosts.

    Args:
        shared_memory: whether large tensors may go through shared memory.
        shared_memory_limit_bytes: how much shared memory this node may hold for sending.
        device_sharing: whether other processes of this host may open device memory of this one; if not, or where that
            does not work, tensors on devices go through the host.
        device_views: tensors of 1 MiB and more from another process of this host stay in its device memory until they
            die, instead of being copied; ``docs/gpu.md`` says what that means.
        device_memory_limit_bytes: how much device memory this node may hold for sending, and as much again for versions
            of weights that it publishes.
        transfer_engine: a library that reads and writes shared tensors (`farcall.share`) of other hosts: ``"nixl"``, or
            ``"module:function"``, which makes one. Workers that name the same one use it; others send calls. Its bytes
            are neither proved nor encrypted, so it needs ``encryption="off"``; ``docs/weights.md`` says more.
    """

    shared_memory: bool = True
    shared_memory_limit_bytes: int = 4 << 30
    device_sharing: bool = True
    device_views: bool = False
    device_memory_limit_bytes: int = 4 << 30
    transfer_engine: str | None = None

    def __post_init__(self) -> None:
        self._check(check.flag, "shared_memory", "device_sharing", "device_views")
        self._check(check.count, "shared_memory_limit_bytes", "device_memory_limit_bytes")
        if self.transfer_engine is not None:
            self._check(check.text, "transfer_engine")


@dataclass(frozen=True, kw_only=True)
class LimitOptions(_Checked):
    """The bounds of the queues, and the fate of calls that meet one.

    Args:
        send_backlog_limit_bytes: unsent bytes a link may hold before its senders have to wait.
        max_queued_calls: how many calls of others may wait for a thread here. Beyond that their callers have to wait,
            or fail, as each of them chose. Calls that run, or have returned a future, do not count.
        when_overloaded: a call made here that meets such a limit may ``"wait"``, unsent, for as long as its timeout
            allows, or ``"fail"`` at once with `Overloaded`. ``Retry`` calls again after that.
    """

    send_backlog_limit_bytes: int = 64 << 20
    max_queued_calls: int = 100_000
    when_overloaded: str = "wait"

    def __post_init__(self) -> None:
        self._check(check.count, "send_backlog_limit_bytes", "max_queued_calls")
        if self.when_overloaded not in ("wait", "fail"):
            raise ValueError(f'when_overloaded must be "wait" or "fail", not {self.when_overloaded!r}')


@dataclass(frozen=True, kw_only=True)
class ObservingOptions(_Checked):
    """Logs, metrics and the live page of a node, and who may observe it.

    Args:
        cluster_name: the name of this cluster for people, in ``farcall top``, on the live page and for ``--cluster``.
            Default: ``FARCALL_CLUSTER_NAME``, else a number that farcall makes.
        observable: whether commands of the same user on this host (``farcall top``, ``farcall stacks``) find this node,
            by a file that only this user may read. With the secret of observers it can be observed in any case.
        secret: what observers prove, the same at all workers. Default: ``FARCALL_OBSERVERS_SECRET``, else the cluster's
            secret; in a group with a table of `farcall.allow` a secret that each node makes for itself, so that only
            its own user can look at it.
        runtime_directory: the directory of those files. Default: ``FARCALL_RUNTIME_DIRECTORY``, else ``farcall`` in
            ``XDG_RUNTIME_DIR``, else ``farcall-<user number>`` in the directory for temporary files.
        metrics_port: serve metrics there in Prometheus' text format, or at the next free port where another process has
            that one (the log says which); 0 lets the system choose. Needs
            ``pip install 'farcall[metrics]'``. Default: ``FARCALL_METRICS_PORT``, else none are served.
        metrics_host: the address to serve them on. Where it is not loopback and there are certificates (``tls``), over
            TLS, to clients with one of the same authority; else to everybody.
        dashboard_port: serve the live page there; 0 lets the system choose. Default: ``FARCALL_DASHBOARD_PORT``, else
            this node does not serve it; ``farcall dashboard`` can at any time.
        dashboard_host: the address to serve it on. Where that is not loopback, over TLS only (``tls``, with
            certificates). The URL has a secret in it: ``node.dashboard_url``.
        opentelemetry: make a span of each call made and served, with OpenTelemetry's API and the tracer provider that
            the program has set up; the callee's spans are children of the caller's.
        log: ``"info"`` or ``"debug"``, perhaps with ``:`` and a file, to have farcall log there (else to stderr) by
            itself. Default: ``FARCALL_LOG``, else farcall logs through ``logging`` only, as a library should.
    """

    observable: bool = True
    secret: str | bytes | None = field(default=None, repr=False)
    cluster_name: str | None = None
    runtime_directory: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    dashboard_port: int | None = None
    dashboard_host: str = "127.0.0.1"
    opentelemetry: bool = False
    log: str | None = None

    def __post_init__(self) -> None:
        self._check(check.flag, "observable", "opentelemetry")
        self._check_or_look_up(check_secret, "secret", ENV_OBSERVERS_SECRET)
        self._check_or_look_up(check.text, "runtime_directory", ENV_RUNTIME_DIRECTORY)
        self._check_or_look_up(check.text, "cluster_name", ENV_CLUSTER_NAME)
        self._check_or_look_up(check.port, "metrics_port", ENV_METRICS_PORT)
        self._check_or_look_up(check.port, "dashboard_port", ENV_DASHBOARD_PORT)
        self._check_or_look_up(check.log, "log", ENV_LOG)

    def given_secret(self) -> Secret | None:
        """The secret of observers; None where none was given."""
        return None if self.secret is None else _secret_of(self.secret)


def _secret_of(value: str | bytes) -> Secret:
    return Secret(value.encode() if isinstance(value, str) else value)


@dataclass(frozen=True, kw_only=True)
class TlsOptions(_Checked):
    """Certificates of your own: both ends of a connection over TCP show one, besides proving the secret.

    Args:
        ca: a file with the certificate of the authority that has signed those of all members (PEM).
        certificate: a file with this node's certificate.
        key: a file with its private key.
        check_hosts: the certificate of a member must name the host, or the address, that is dialled.
        bind_names: the certificate of a worker must also have the worker's name among its own.

    ``farcall certificates`` makes such files. They are read again when they change.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""
    check_hosts: bool = True
    bind_names: bool = False

    def __post_init__(self) -> None:
        self._check(check.flag, "check_hosts", "bind_names")
        for name in ("ca", "certificate", "key"):
            path = getattr(self, name)
            if not isinstance(path, str | os.PathLike):
                raise TypeError(f"{name} of TlsOptions must be a path, not {path!r}")
            self._set(name, os.fspath(path))
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
    """How a node finds its peers, talks to them, and how much it may use. ``options.replace(...)`` is a changed copy.

    Args:
        rpc_timeout: seconds a call may take unless it says otherwise; None means without limit.
        init_method: where the members meet: ``env://``, ``tcp://host:port`` or ``file:///path``. For a group without
            a fixed size also ``farcall://host:port``, the address of any member: that needs no store.
        num_worker_threads: threads kept ready for user functions; more are started when all of them wait for calls.
        start_timeout_s: how long ``init_rpc`` waits for the other members. Default: 60 s, or ``rpc_timeout`` where that
            is longer (a short call timeout says nothing about how long processes take to start).
        advertise: host name or IP address, without a port, that this node tells the others. Default:
            ``FARCALL_ADVERTISE``, else the local address that reaches the store.
        port: where this node listens for members over TCP. Default: 0, the system chooses.
        secret: the secret that every member must know, at least 16 random bytes; text counts as UTF-8. Default:
            ``FARCALL_SECRET``, else ``secret_file``, else a key of this user's on this machine, which members on other
            machines, or of other users, do not have.
        secret_file: a file with the secret; or with two, one to a line, while you change it: this node proves the
            first, and lets in members with either. It is read again when it changes. Default:
            ``FARCALL_SECRET_FILE``.
        encryption: ``"on"``, or ``"off"`` for a network that is yours alone: then connections over TCP are plain bytes
            behind the proof of the secret, which whoever is on the way can read and change. The same for all members.
            Default: ``FARCALL_ENCRYPTION``, else on.
        tls: `TlsOptions`, to encrypt with certificates of your own. Default: ``FARCALL_TLS_CA``, ``FARCALL_TLS_CERT``
            and ``FARCALL_TLS_KEY``, names of files; else each process makes one for itself, in memory.
        allowed: ``"module:table"``, a dict with the arguments of `farcall.allow`: what others may call, create and
            publish here. Default: ``FARCALL_ALLOWED``, else everything.
        transports: ``"unix"``, ``"tcp"`` or both. Default: ``FARCALL_TRANSPORTS`` (comma separated), else both.
        device_maps: for each callee, from devices here to devices there: ``{"ps": {"cuda:0": "cuda:1"}}``. Devices are
            named, numbered (``0`` is ``"cuda:0"``) or ``torch.device``; also ``"cpu"``. Answers, and gradients, take
            the way back. Without a map a tensor on a device is not sent.
        devices: the devices that calls use here. Default: those that maps lead from or to.
        automatic_device_maps: every callee that has no map gets the identity: tensors on ``cuda:1`` go to ``cuda:1``.
        busy_wait_s: a thread that expects to wait less than this polls before it sleeps, and stops doing so where that
            does not pay. 0 means never.
        inherit: the calls of a function have at most the time that its caller has left, carry its metadata, and are
            cancelled with it. False: none of that, as in torch.distributed.rpc; running functions are not cancelled.
        membership: `MembershipOptions`: when a silent member is dead.
        memory: `MemoryOptions`: the memory that large tensors travel through.
        limits: `LimitOptions`: the bounds of queues.
        observing: `ObservingOptions`: logs, metrics, the live page.
    """

    rpc_timeout: float | None = DEFAULT_RPC_TIMEOUT_S
    init_method: str = DEFAULT_INIT_METHOD
    _: KW_ONLY
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS
    start_timeout_s: float | None = None
    advertise: str | None = None
    port: int = 0
    secret: str | bytes | None = field(default=None, repr=False)
    secret_file: str | None = None
    encryption: str | None = None
    tls: TlsOptions | None = None
    allowed: str | None = None
    transports: Sequence[str] | None = None
    device_maps: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    devices: Sequence[Any] = ()
    automatic_device_maps: bool = False
    busy_wait_s: float = 150e-6
    inherit: bool = True
    membership: MembershipOptions = field(default_factory=MembershipOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)
    observing: ObservingOptions = field(default_factory=ObservingOptions)

    def __post_init__(self) -> None:
        if self.rpc_timeout is not None:
            self._set("rpc_timeout", check.some_seconds("rpc_timeout", self.rpc_timeout, "None means no limit"))
        if self.start_timeout_s is not None:  # 0 is not for ever: init_rpc never waits without a bound
            self._check(check.some_seconds, "start_timeout_s")
        self._check(check.seconds, "busy_wait_s")
        self._check(check.init_method, "init_method")
        self._check(check.count, "num_worker_threads")
        self._check(check.flag, "automatic_device_maps", "inherit")
        self._check(check.device_maps, "device_maps")
        self._check(check.devices, "devices")
        self._set("port", 0 if self.port is None else check.port("port", self.port))
        self._check_or_look_up(check.host, "advertise", ENV_ADVERTISE)
        self._check_or_look_up(check.table, "allowed", ENV_ALLOWED)
        self._check_or_look_up(check.transports, "transports", ENV_TRANSPORTS)
        secret, path = _choose_secret(self.secret, self.secret_file)
        self._set("secret", secret)
        self._set("secret_file", path)
        if self.tls is None:
            self._set("tls", _tls_from_environment())
        else:
            self._check_group(TlsOptions, "tls")
        self._check_group(MembershipOptions, "membership")
        self._check_group(MemoryOptions, "memory")
        self._check_group(LimitOptions, "limits")
        self._check_group(ObservingOptions, "observing")
        self._check_or_look_up(check.encryption, "encryption", ENV_ENCRYPTION)
        self._set("encryption", self.encryption or "on")  # workers that are launched get this process's choice
        if self.tls is not None and not self.encrypts:
            raise ValueError('certificates (tls, FARCALL_TLS_CA) and encryption="off": leave one of them out')
        if self.encrypts and self.memory.transfer_engine is not None:
            raise ValueError(
                "a transfer engine does not encrypt what it moves: leave out transfer_engine or, on a network that is "
                'yours alone, set encryption="off" on all members'
            )

    @property
    def start_deadline_s(self) -> float:
        """Seconds that ``init_rpc`` may take, the default worked out."""
        return max(60.0, self.rpc_timeout or 0.0) if self.start_timeout_s is None else self.start_timeout_s

    @property
    def allowed_transports(self) -> tuple[str, ...]:
        """The transports that may be used, the preferred one first."""
        return TRANSPORTS if self.transports is None else tuple(self.transports)

    @property
    def encrypts(self) -> bool:
        """Are connections over a network encrypted?"""
        return self.encryption != "off"

    @property
    def has_secret(self) -> bool:
        """Was a secret given? If not, this user's key stands in for it."""
        return self.secret is not None or self.secret_file is not None

    def given_secret(self) -> Secret | None:
        """The configured secret, or None where this user's key stands in for one; reads its file."""
        if self.secret_file is not None:
            return Secret(path=self.secret_file)
        return None if self.secret is None else _secret_of(self.secret)

    @property
    def names_devices(self) -> bool:
        """Do the options name devices? If not, none is ever looked at."""
        return bool(self.device_maps or self.devices or self.automatic_device_maps)

    def replace(self, **changes: Any) -> RpcBackendOptions:
        """Return a copy with ``changes`` made, checked like a new one."""
        return dataclasses.replace(self, **changes)


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
    if secret is not None:
        check_secret(f"secret (or {ENV_SECRET})", secret)
    return secret, path


def _tls_from_environment() -> TlsOptions | None:
    files = [os.environ.get(variable) or "" for variable in ENV_TLS_FILES]
    if not any(files):
        return None
    if not all(files):
        raise ValueError(f"set all of {', '.join(ENV_TLS_FILES)}, or none")
    return TlsOptions(ca=files[0], certificate=files[1], key=files[2])

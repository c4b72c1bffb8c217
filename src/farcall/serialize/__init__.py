"""Values to bytes and back: arguments, results, functions and failures, tensor memory beside the bytes."""

from farcall.serialize.context import Annotated, Decoding, Encoding, current_decoding, current_encoding
from farcall.serialize.devices import PeerDevices, discard, has_devices, withdraw
from farcall.serialize.failures import RemoteTraceback, decode_failure, encode_failure, in_one_line
from farcall.serialize.functions import decode_function, encode_function
from farcall.serialize.pickler import Encoded, TablePickler, decode, encode, encode_call, encode_recorded, is_custom
from farcall.serialize.policy import RpcPickler, installed_pickler, register_reducer, use_rpc_pickler
from farcall.serialize.recording import RECORDING, Recording
from farcall.serialize.tensors import map_cpu_tensors

__all__ = [
    "RECORDING",
    "Annotated",
    "Decoding",
    "Encoded",
    "Encoding",
    "PeerDevices",
    "Recording",
    "RemoteTraceback",
    "RpcPickler",
    "TablePickler",
    "current_decoding",
    "current_encoding",
    "decode",
    "decode_failure",
    "decode_function",
    "discard",
    "encode",
    "encode_call",
    "encode_failure",
    "encode_function",
    "encode_recorded",
    "has_devices",
    "in_one_line",
    "installed_pickler",
    "is_custom",
    "map_cpu_tensors",
    "register_reducer",
    "use_rpc_pickler",
    "withdraw",
]

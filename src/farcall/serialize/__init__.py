"""Values to bytes and back: arguments, results, functions and failures, tensor memory beside the bytes."""

from farcall.serialize.allowance import Allowance
from farcall.serialize.context import (
    Encoding,
    WithCall,
    current_decoding,
    current_encoding,
    decline,
    tie,
    withdraw,
)
from farcall.serialize.devices import discard, has_devices, withdraw_lent
from farcall.serialize.failures import decode_failure, encode_failure, in_one_line
from farcall.serialize.functions import decode_function, encode_function
from farcall.serialize.pickler import FLAT_FORM, TablePickler, read_value, restrict, takes_long, write_call, write_value
from farcall.serialize.policy import installed_pickler, register_reducer, register_references, use_rpc_pickler
from farcall.serialize.recording import RECORDING
from farcall.serialize.tensors import map_cpu_tensors

__all__ = [
    "FLAT_FORM",
    "RECORDING",
    "Allowance",
    "Encoding",
    "TablePickler",
    "WithCall",
    "current_decoding",
    "current_encoding",
    "decline",
    "decode_failure",
    "decode_function",
    "discard",
    "encode_failure",
    "encode_function",
    "has_devices",
    "in_one_line",
    "installed_pickler",
    "map_cpu_tensors",
    "read_value",
    "register_reducer",
    "register_references",
    "restrict",
    "takes_long",
    "tie",
    "use_rpc_pickler",
    "withdraw",
    "withdraw_lent",
    "write_call",
    "write_value",
]

// The operators, and how they come into TorchScript's table in the place of torch's own.
//
// An operator that was replaced is kept for good. Code that was compiled before holds a bare pointer to it; and when
// farcall is not in place any more, it is what ours hand on to.

#pragma once

#include "values.h"

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/custom_class.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

using torch::distributed::autograd::DistAutogradContainer;
using torch::jit::Node;
using torch::jit::Operation;
using torch::jit::Operator;
using torch::jit::Stack;

enum Which {
  RPC_SYNC,
  RPC_ASYNC,
  RPC_REMOTE,
  TO_HERE,
  LOCAL_VALUE,
  IS_OWNER,
  OWNER,
  OWNER_NAME,
  CONFIRMED_BY_OWNER,
  GET_GRADIENTS,
  BACKWARD,
  COUNT
};

constexpr std::array<const char*, COUNT> names = {
    "prim::rpc_sync",
    "prim::rpc_async",
    "prim::rpc_remote",
    "aten::to_here",
    "aten::local_value",
    "aten::is_owner",
    "aten::owner",
    "aten::owner_name",
    "aten::confirmed_by_owner",
    "aten::get_gradients",
    "aten::dist_backward",
};

std::array<std::shared_ptr<Operator>, COUNT> replaced;

struct Call {
  py::object to, name, args, kwargs, timeout, context;
};

py::object destination(const IValue& to) {
  if (to.isString()) {
    return py::str(to.toStringRef());
  }
  if (to.type() == c10::getCustomClassType<c10::intrusive_ptr<rpc::WorkerInfo>>()) {
    return py::str(to.toCustomClass<rpc::WorkerInfo>()->name_);
  }
  throw std::runtime_error("a script calls a worker by its name or WorkerInfo, not by " + to.tagKind());
}

Call take_call(Stack& stack, size_t count) {
  auto inputs = torch::jit::last(stack, count);
  Call call;
  call.to = destination(inputs[0]);
  call.name = py::str(inputs[1].toStringRef());
  call.args = count > 2 ? toPyObject(inputs[2]) : py::object(py::tuple());
  call.kwargs = count > 3 ? toPyObject(inputs[3]) : py::object(py::dict());
  call.timeout = count > 4 ? toPyObject(inputs[4]) : py::object(py::float_(-1.0));
  call.context = py::int_(DistAutogradContainer::currentContextId());
  torch::jit::drop(stack, count);
  return call;
}

IValue issue(Which which, const Call& call, const TypePtr& type) {
  auto with = [&](const char* name) {
    return handler(name)(call.to, call.name, call.args, call.kwargs, call.timeout, call.context);
  };
  if (which == RPC_SYNC) {
    return value_of(with("call_sync"), type);
  }
  if (which == RPC_REMOTE) {
    auto rref = make_reference(with("call_remote"), type->expect<c10::RRefType>()->getElementType());
    return IValue(c10::static_intrusive_pointer_cast<c10::RRefInterface>(rref));
  }
  auto element = type->expect<c10::FutureType>()->getElementType();
  auto future = c10::make_intrusive<c10::ivalue::Future>(element);
  py::object pending = with("call_async");
  pending.attr("add_done_callback")(
      py::cpp_function([future, element](const py::object& done) { complete(future, done, element); }));
  return IValue(std::move(future));
}

IValue fetch(Which which, const py::object& rref, const py::object& timeout, const TypePtr& type) {
  auto found = which == TO_HERE ? handler("to_here")(rref, timeout, type->is_module()) : handler("local_value")(rref);
  auto value = value_or_object(found, type);
  if (is_mutable(type) && !value.isPyObject() && !py::isinstance<ScriptValue>(found)) {
    handler("keep_value")(rref, py::cast(ScriptValue{value}));
  }
  return value;
}

IValue use_reference(Which which, Stack& stack, size_t count, const TypePtr& type) {
  py::object timeout = count > 1 ? toPyObject(torch::jit::pop(stack)) : py::none();
  auto held = torch::jit::pop(stack).toRRef();
  auto rref = python_of(held);
  switch (which) {
    case IS_OWNER:
      return IValue(rref.attr("is_owner")().cast<bool>());
    case OWNER_NAME:
      return IValue(rref.attr("owner_name")().cast<std::string>());
    case CONFIRMED_BY_OWNER:
      return IValue(rref.attr("confirmed_by_owner")().cast<bool>());
    case OWNER: {
      auto owner = rref.attr("owner")();
      return torch::make_custom_class<rpc::WorkerInfo>(
          owner.attr("name").cast<std::string>(), owner.attr("id").cast<int64_t>());
    }
    default:
      return fetch(which, rref, timeout, type ? type : held->type());
  }
}

void use_gradients(Which which, Stack& stack, const TypePtr& type) {
  if (which == GET_GRADIENTS) {
    auto context = torch::jit::pop(stack);
    stack.push_back(toIValue(handler("get_gradients")(toPyObject(context)), type));
    return;
  }
  auto retain_graph = toPyObject(torch::jit::pop(stack));
  auto roots = toPyObject(torch::jit::pop(stack));
  auto context = toPyObject(torch::jit::pop(stack));
  handler("backward")(context, roots, retain_graph);
}

template <Which which>
void run(Stack& stack, size_t count, const TypePtr& type) {
  InPython here;
  try {
    if constexpr (which <= RPC_REMOTE) {
      auto call = take_call(stack, count);
      stack.push_back(issue(which, call, type));
    } else if constexpr (which < GET_GRADIENTS) {
      stack.push_back(use_reference(which, stack, count, type));
    } else {
      use_gradients(which, stack, type);
    }
  } catch (const py::error_already_set& error) {
    fail(error);
  }
}

bool is_used_with_other_type(const torch::jit::Block* block, const Node* node) {
  for (const Node* other : block->nodes()) {
    if (other->kind() == node->kind() && *other->output()->type() != *node->output()->type()) {
      return true;
    }
    for (const torch::jit::Block* inner : other->blocks()) {
      if (is_used_with_other_type(inner, node)) {
        return true;
      }
    }
  }
  return false;
}

// The type of what the operator returns; nullptr: each reference has to be asked for its own. The interpreter creates
// one operation for all uses of `to_here` in a function, whatever their types.
TypePtr type_of_result(Which which, const Node* node) {
  if (node->outputs().empty()) {
    return c10::NoneType::get();
  }
  if ((which == TO_HERE || which == LOCAL_VALUE) &&
      is_used_with_other_type(node->owningGraph()->block(), node)) {
    return nullptr;
  }
  return node->output()->type();
}

template <Which which>
Operation create(const Node* node) {
  const size_t count = node->inputs().size();
  const TypePtr type = type_of_result(which, node);
  Operation theirs = replaced[which]->getOperation(node);
  return [=](Stack& stack) mutable {
    if (enabled) {
      run<which>(stack, count, type);
    } else {
      theirs(stack);
    }
  };
}

// All of them, before the first is replaced: in a torch that farcall does not know nothing is changed.
void find_all() {
  for (size_t which = 0; which < COUNT; ++which) {
    auto found = torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(names[which]));
    TORCH_CHECK(found.size() == 1, names[which], " has ", found.size(), " forms in this torch; farcall knows one");
    replaced[which] = found[0];
  }
}

template <Which which>
void replace() {
  auto symbol = c10::Symbol::fromQualString(names[which]);
  auto aliasing = replaced[which]->aliasAnalysisKind();
  auto schema = replaced[which]->schema();
  torch::jit::deregisterOperator(schema);
  if (schema.is_vararg()) {
    torch::jit::registerOperator(Operator(symbol, create<which>, aliasing));
    return;
  }
  torch::jit::registerOperator(Operator(c10::toString(schema), create<which>, aliasing));
}

void replace_all() {
  find_all();
  replace<RPC_SYNC>();
  replace<RPC_ASYNC>();
  replace<RPC_REMOTE>();
  replace<TO_HERE>();
  replace<LOCAL_VALUE>();
  replace<IS_OWNER>();
  replace<OWNER>();
  replace<OWNER_NAME>();
  replace<CONFIRMED_BY_OWNER>();
  replace<GET_GRADIENTS>();
  replace<BACKWARD>();
}

}  // namespace

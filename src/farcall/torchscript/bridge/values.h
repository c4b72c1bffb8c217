// Any other value on its way: a Python object and an IValue, by the type that the script was compiled with.

#pragma once

#include "references.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include <exception>
#include <utility>

namespace {

using c10::IValue;
using torch::jit::toIValue;
using torch::jit::toPyObject;

// A value that scripts may change in place, at the owner of a reference to it.
struct ScriptValue {
  IValue value;
};

// Lists, dicts and objects are copied on their way from Python, so a script would change its copy.
bool is_mutable(const TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::ListType:
    case c10::TypeKind::DictType:
      return true;
    case c10::TypeKind::ClassType:
      return !type->is_module();
    default:
      return false;
  }
}

bool contains_reference(const TypePtr& type) {
  if (type->kind() == c10::TypeKind::RRefType) {
    return true;
  }
  for (const auto& part : type->containedTypes()) {
    if (contains_reference(part)) {
      return true;
    }
  }
  return false;
}

// `value` with torch's objects in the place of farcall's references. `convert` does that by itself, but only below a
// call from Python into torch, which keeps what it makes; and TorchScript has threads of its own.
py::object with_references(const py::object& value) {
  if (py::type::handle_of(value).is(handlers->reference_class)) {
    return py::cast(rpc::PyRRef(make_reference(value, nullptr)));
  }
  auto each = [](const py::handle& one) { return with_references(py::reinterpret_borrow<py::object>(one)); };
  if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
    py::list items;
    for (auto one : value) {
      items.append(each(one));
    }
    return py::isinstance<py::list>(value) ? py::object(items) : py::object(py::tuple(items));
  }
  if (py::isinstance<py::dict>(value)) {
    py::dict items;
    for (auto one : value.cast<py::dict>()) {
      items[each(one.first)] = each(one.second);
    }
    return items;
  }
  auto attributes = handler("attributes_of")(value);
  if (!attributes.is_none()) {
    // All that torch asks an object for are its attributes.
    return py::module_::import("types").attr("SimpleNamespace")(**with_references(attributes).cast<py::dict>());
  }
  return value;
}

IValue value_of(const py::object& value, const TypePtr& type) {
  if (py::isinstance<ScriptValue>(value)) {
    return value.cast<ScriptValue&>().value;
  }
  return toIValue(contains_reference(type) ? with_references(value) : value, type);
}

// The same for a value that Python made, of which nobody promised that it has the type that the script says: then the
// script has it as it is, as in torch.
IValue value_or_object(const py::object& value, const TypePtr& type) {
  try {
    return value_of(value, type);
  } catch (const py::error_already_set&) {
    throw;
  } catch (const std::exception&) {
    return toIValue(value, c10::PyObjectType::get());
  }
}

void complete(const c10::intrusive_ptr<c10::ivalue::Future>& future, const py::object& done, const TypePtr& type) {
  IValue value;
  std::exception_ptr error;
  try {
    value = value_of(done.attr("value")(), type);
  } catch (py::error_already_set& raised) {
    error = std::make_exception_ptr(std::runtime_error(text_of(raised)));
  } catch (const std::exception& raised) {
    error = std::make_exception_ptr(std::runtime_error(raised.what()));
  }
  OutOfPython here;  // whoever waits goes on here
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(std::move(value));
  }
}

}  // namespace

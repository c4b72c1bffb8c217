// A reference on its way between the two worlds: farcall's RRef, a Python object, and Reference, which an IValue can
// hold.

#pragma once

#include "handlers.h"

#include <torch/csrc/distributed/rpc/py_rref.h>
#include <torch/csrc/distributed/rpc/rref_impl.h>

#include <atomic>
#include <string>
#include <utility>

namespace {

namespace rpc = torch::distributed::rpc;
using c10::TypePtr;

std::atomic<int64_t> next_number{1};

// farcall's RRef, as something that an IValue can hold.
class Reference final : public rpc::RRef {
 public:
  // With the interpreter lock held.
  Reference(py::object rref, TypePtr known_type, rpc::worker_id_t here, rpc::worker_id_t owner)
      : rpc::RRef(owner, rpc::RRefId(here, next_number++), c10::PyObjectType::get()),
        rref_(rref.release().ptr()),
        known_type_(std::move(known_type)),
        here_(here) {}

  ~Reference() override {
    if (enter()) {
      {
        py::gil_scoped_acquire gil;
        Py_DECREF(rref_);
      }
      --inside;
    }
  }

  py::object python() const {
    return py::reinterpret_borrow<py::object>(rref_);
  }

  std::string ownerName() const override {
    InPython here;
    return ask<std::string>("owner_name");
  }

  bool isOwner() const override {
    InPython here;
    return ask<bool>("is_owner");
  }

  bool confirmedByOwner() const override {
    InPython here;
    return ask<bool>("confirmed_by_owner");
  }

  // Asked for where an attribute of a module is a reference; the owner may have to be asked, so only then.
  const TypePtr type() const override {
    InPython here;
    if (!known_type_) {
      try {
        py::object found = handler("type_of")(python());
        known_type_ = found.is_none() ? TypePtr(c10::PyObjectType::get()) : found.cast<TypePtr>();
      } catch (const py::error_already_set& error) {
        fail(error);
      }
    }
    return known_type_;
  }

 protected:
  // TorchScript writes this reference into a file. Who reads it asks this worker for the reference of that number.
  // Owner and parent are the same, so that torch finds nothing to tell anybody.
  rpc::RRefForkData fork() const override {
    const auto name = type()->annotation_str();
    InPython here;
    try {
      handler("keep_pickled")(rrefId().localId_, python());
    } catch (const py::error_already_set& error) {
      fail(error);
    }
    return rpc::RRefForkData(here_, rrefId(), rpc::ForkId(here_, next_number++), here_, name);
  }

 private:
  template <typename T>
  T ask(const char* method) const {
    try {
      return python().attr(method)().cast<T>();
    } catch (const py::error_already_set& error) {
      fail(error);
    }
  }

  PyObject* rref_;
  mutable TypePtr known_type_;
  const rpc::worker_id_t here_;
};

c10::intrusive_ptr<rpc::RRef> make_reference(const py::object& rref, TypePtr type) {
  auto numbers = handler("numbers_of")(rref).cast<std::pair<rpc::worker_id_t, rpc::worker_id_t>>();
  return c10::make_intrusive<Reference>(rref, std::move(type), numbers.first, numbers.second);
}

// farcall's RRef inside of a reference that TorchScript holds. With the interpreter lock held.
py::object python_of(const c10::intrusive_ptr<c10::RRefInterface>& held) {
  if (auto ours = c10::dynamic_intrusive_pointer_cast<Reference>(held)) {
    return ours->python();
  }
  // One that torch made when it read a file; see Reference::fork.
  auto theirs = c10::dynamic_intrusive_pointer_cast<rpc::RRef>(held);
  TORCH_CHECK(theirs, "this reference is of a kind that farcall does not know");
  return handler("find_pickled")(theirs->rrefId().createdOn_, theirs->rrefId().localId_);
}

// What pybind11 calls where torch wants its own PyRRef and finds another object.
PyObject* convert(PyObject* source, PyTypeObject*) {
  if (!enabled || reinterpret_cast<PyObject*>(Py_TYPE(source)) != handlers->reference_class.ptr()) {
    return nullptr;
  }
  try {
    auto rref = py::reinterpret_borrow<py::object>(source);
    return py::cast(rpc::PyRRef(make_reference(rref, nullptr))).release().ptr();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("farcall: a reference on its way into TorchScript");
    return nullptr;
  }
}

// farcall's RRef inside of torch's PyRRef, which is what TorchScript gives to Python; None if it is torch's own.
py::object unwrap(py::handle wrapped) {
  if (!enabled) {
    return py::none();
  }
  return python_of(wrapped.cast<rpc::PyRRef&>().toIValue().toRRef());
}

}  // namespace

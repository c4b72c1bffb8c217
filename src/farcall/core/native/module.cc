// The core for Python: objects and bytes in and out, and where the interpreter is given up. Nothing of the core's is
// locked while Python runs, and no function here waits while it holds the interpreter.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <system_error>

#include "core.h"

using namespace farcall;

namespace {

constexpr double PATIENCE = 0.03;  // of the main thread, which must look for signals

struct State {
    PyObject *arrived, *counts, *traffic, *error, *stopped;
    PyTypeObject *memory, *handle;
    bool is_waiting;  // of the main thread: a handler of a signal is run by a wait
};
State state;

// In a wait, let handlers of signals run, which may raise: nothing of the core is half done.
bool is_interrupted() {
    bool before = state.is_waiting;
    state.is_waiting = true;
    bool raised = PyErr_CheckSignals() != 0;
    state.is_waiting = before;
    return raised;
}

struct CoreObject {
    PyObject_HEAD
    Core* core;
    std::shared_ptr<Core>* owner;
    unsigned forks;
    bool is_stopped;
};

// Takes the interpreter back at its end. Only plain data may be made after it in the same scope: before Python 3.14 a
// thread that comes back while the interpreter ends is unwound from here.
class WithoutInterpreter {
   public:
    WithoutInterpreter() : thread_(PyEval_SaveThread()) { is_outside = true; }
    ~WithoutInterpreter() noexcept(false) {
        PyEval_RestoreThread(thread_);
        is_outside = false;
    }
    static thread_local bool is_outside;  // also of a thread that is unwound

   private:
    PyThreadState* thread_;
};
thread_local bool WithoutInterpreter::is_outside = false;

// No exception of the core's gets into Python's own code. (What unwinds a thread is none of `std`'s, and passes.)
template <class Function>
PyObject* without_exceptions(const Function& function) {
    try {
        return function();
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    } catch (const std::system_error& error) {
        errno = error.code().value();
        return PyErr_SetFromErrno(PyExc_OSError);
    } catch (const std::exception& error) {
        PyErr_SetString(state.error, error.what());
        return nullptr;
    }
}

template <auto Method>
PyObject* safe(PyObject* self, PyObject* args) {
    return without_exceptions([=] { return Method(self, args); });
}

template <auto Method>
PyObject* safe_with_keywords(PyObject* self, PyObject* args, PyObject* keywords) {
    return without_exceptions([=] { return Method(self, args, keywords); });
}

bool is_main_thread() {
    static thread_local unsigned asked = ~0u;
    static thread_local bool yes;
    if (asked != forks()) {
        asked = forks();
        yes = static_cast<unsigned long>(getpid()) == PyThread_get_thread_native_id();
    }
    return yes;
}

double patience() { return is_main_thread() ? PATIENCE : -1; }

// ---------------------------------------------------------------------- memory that arrived

struct MemoryObject {
    PyObject_HEAD
    Memory memory;
};

PyObject* view_of(Memory memory) {
    auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(state.memory, Py_tp_alloc));
    PyObject* made = allocate(state.memory, 0);
    if (!made) return nullptr;
    new (&reinterpret_cast<MemoryObject*>(made)->memory) Memory(std::move(memory));
    PyObject* view = PyMemoryView_FromObject(made);
    Py_DECREF(made);
    return view;
}

void memory_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    reinterpret_cast<MemoryObject*>(self)->memory.~Memory();
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

int memory_buffer(PyObject* self, Py_buffer* view, int flags) {
    Block& block = *reinterpret_cast<MemoryObject*>(self)->memory;
    return PyBuffer_FillInfo(view, self, block.bytes, static_cast<Py_ssize_t>(block.size), 0, flags);
}

PyType_Slot memory_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(memory_dealloc)},
                              {Py_bf_getbuffer, reinterpret_cast<void*>(memory_buffer)},
                              {0, nullptr}};
PyType_Spec memory_spec = {"farcall.core._core.Memory", sizeof(MemoryObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, memory_slots};

// ---------------------------------------------------------------------- frames that are being placed

struct HandleObject {
    PyObject_HEAD
    PyObject* core;
    bool is_placed;
    Content message;  // for `defer` and `pause_behind`; its memory is shared with what was handed out
};

void handle_dealloc(PyObject* self) {
    auto* handle = reinterpret_cast<HandleObject*>(self);
    auto* owner = reinterpret_cast<CoreObject*>(handle->core);
    if (!handle->is_placed && owner->core && owner->forks == forks()) {
        Message message;
        static_cast<Content&>(message) = std::move(handle->message);
        owner->core->abandon(std::move(message));
    }
    handle->message.~Content();
    PyTypeObject* type = Py_TYPE(self);
    Py_DECREF(handle->core);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

PyType_Slot handle_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(handle_dealloc)}, {0, nullptr}};
PyType_Spec handle_spec = {"farcall.core._core.Handle", sizeof(HandleObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, handle_slots};

// Takes the message, but for its descriptor; payload and buffers are shared with what is handed out.
PyObject* make_handle(CoreObject* core, Message& message) {
    auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(state.handle, Py_tp_alloc));
    PyObject* made = allocate(state.handle, 0);
    if (!made) return nullptr;
    auto* handle = reinterpret_cast<HandleObject*>(made);
    handle->core = Py_NewRef(reinterpret_cast<PyObject*>(core));
    handle->is_placed = false;
    new (&handle->message) Content(message);
    return made;
}

// ---------------------------------------------------------------------- what arrives

PyObject* buffers_of(Message& message) {
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(message.buffers.size()));
    if (!list) return nullptr;
    for (size_t i = 0; i < message.buffers.size(); i++) {
        Buffer& buffer = message.buffers[i];
        PyObject* item = buffer.memory
                             ? view_of(buffer.memory)
                             : Py_BuildValue("(KKK)", static_cast<unsigned long long>(buffer.ticket.size),
                                             static_cast<unsigned long long>(buffer.ticket.segment),
                                             static_cast<unsigned long long>(buffer.ticket.offset));
        if (!item) {
            Py_DECREF(list);
            return nullptr;
        }
        PyList_SetItem(list, static_cast<Py_ssize_t>(i), item);
    }
    return list;
}

// Takes the items. Null where one of them is.
template <size_t Count>
PyObject* sequence_of(PyObject* type, PyObject* (&items)[Count]) {
    bool complete = true;
    for (PyObject* item : items) complete &= item != nullptr;
    PyObject* made = complete ? PyStructSequence_New(reinterpret_cast<PyTypeObject*>(type)) : nullptr;
    for (size_t i = 0; i < Count; i++) {
        if (made)
            PyStructSequence_SetItem(made, static_cast<Py_ssize_t>(i), items[i]);
        else
            Py_XDECREF(items[i]);
    }
    return made;
}

PyObject* arrived(CoreObject* core, Message& message) {
    const char* text = message.text.data();
    size_t notes_at = message.function_bytes, payload_at = notes_at + message.notes_bytes;
    bool is_marked = (message.flags & MARKED) && message.kind < CANCELLED;
    is_marked |= (message.flags & MARKED) && message.kind == DROPPED;
    PyObject* items[] = {
        PyLong_FromLong(message.kind),
        PyLong_FromUnsignedLong(message.flags),
        PyLong_FromUnsignedLong(message.link),
        PyLong_FromUnsignedLongLong(message.number),
        PyBytes_FromStringAndSize(text, message.function_bytes),
        PyBytes_FromStringAndSize(text + notes_at, message.notes_bytes),
        message.payload ? view_of(message.payload)
                        : PyBytes_FromStringAndSize(text + payload_at,
                                                    static_cast<Py_ssize_t>(message.text.size() - payload_at)),
        buffers_of(message),
        is_marked ? make_handle(core, message) : Py_NewRef(Py_None),
        PyLong_FromLong(message.descriptor.release()),
        PyFloat_FromDouble(message.at),
    };
    return sequence_of(state.arrived, items);
}

template <class Messages>
PyObject* list_of(CoreObject* core, Messages& messages) {
    PyObject* list = PyList_New(0);
    for (auto& message : messages) {
        PyObject* item = arrived(core, message);
        if (!list || !item || PyList_Append(list, item)) Py_CLEAR(list);
        Py_XDECREF(item);
        if (!list) break;
    }
    return list;
}

// ---------------------------------------------------------------------- pumps

// The interpreter, amid what was begun without it, perhaps. (No destructor gives it up: see above.)
struct Held {
    PyGILState_STATE state;
    bool was_outside;
};

Held take_interpreter() {
    PyGILState_STATE state = PyGILState_Ensure();
    return {state, std::exchange(WithoutInterpreter::is_outside, false)};
}

void give_up_interpreter(Held held) {
    WithoutInterpreter::is_outside = held.was_outside;
    PyGILState_Release(held.state);
}

class PythonPump : public Pump {
   public:
    explicit PythonPump(PyObject* object) : object_(Py_NewRef(object)) {}
    ~PythonPump() override {
        Held held = take_interpreter();
        Py_DECREF(object_);
        give_up_interpreter(held);
    }

    bool open(const char* bytes, size_t size, std::string& plain, std::string& why) override {
        Held held = take_interpreter();
        PyObject* made = PyObject_CallMethod(object_, "open", "y#", bytes, static_cast<Py_ssize_t>(size));
        bool good = take(made, plain, why);
        give_up_interpreter(held);
        return good;
    }

    bool seal(const iovec* spans, size_t count, std::string& wire, std::string& why) override {
        Held held = take_interpreter();
        PyObject* views = PyList_New(static_cast<Py_ssize_t>(count));
        for (size_t i = 0; views && i < count; i++) {
            PyObject* view = PyMemoryView_FromMemory(static_cast<char*>(spans[i].iov_base),
                                                     static_cast<Py_ssize_t>(spans[i].iov_len), PyBUF_READ);
            if (view)
                PyList_SetItem(views, static_cast<Py_ssize_t>(i), view);
            else
                Py_CLEAR(views);
        }
        PyObject* made = views ? PyObject_CallMethod(object_, "seal", "O", views) : nullptr;
        bool good = take(made, wire, why);
        Py_XDECREF(views);
        give_up_interpreter(held);
        return good;
    }

   private:
    // The bytes that a method returned, or what it raised.
    static bool take(PyObject* made, std::string& bytes, std::string& why) {
        char* at;
        Py_ssize_t size;
        bool good = made && PyBytes_AsStringAndSize(made, &at, &size) == 0;
        if (good) {
            bytes.append(at, static_cast<size_t>(size));
        } else {
            if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) PyErr_SetInterrupt();  // for the program
            PyObject *type, *value, *trace;
            PyErr_Fetch(&type, &value, &trace);
            PyObject* text = value ? PyObject_Str(value) : nullptr;
            PyObject* encoded = text ? PyUnicode_AsUTF8String(text) : nullptr;
            why = encoded ? PyBytes_AsString(encoded) : "a connection's own code failed";
            PyErr_Clear();
            Py_XDECREF(encoded);
            Py_XDECREF(text);
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(trace);
        }
        Py_XDECREF(made);
        return good;
    }

    PyObject* object_;
};

// ---------------------------------------------------------------------- frames that leave

// The large pieces of a frame, and the buffers that hold them.
class Pieces {
   public:
    ~Pieces() { release(); }
    bool take(PyObject* sequence) {
        if (!sequence) return true;
        Py_ssize_t count = PySequence_Size(sequence);
        if (count < 0) return false;
        buffers_.reserve(static_cast<size_t>(count));
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject* item = PySequence_GetItem(sequence, i);
            if (!item) return false;
            buffers_.emplace_back();
            int failed = PyObject_GetBuffer(item, &buffers_.back(), PyBUF_SIMPLE);
            Py_DECREF(item);
            if (failed) {
                buffers_.pop_back();
                return false;
            }
        }
        return true;
    }
    std::vector<Span> spans() const {
        std::vector<Span> spans;
        for (auto& buffer : buffers_) spans.push_back({static_cast<char*>(buffer.buf), static_cast<size_t>(buffer.len)});
        return spans;
    }
    bool empty() const { return buffers_.empty(); }
    void release() {
        if (WithoutInterpreter::is_outside) return;
        for (auto& buffer : buffers_) PyBuffer_Release(&buffer);
        buffers_.clear();
    }

   private:
    std::vector<Py_buffer> buffers_;
};

Core* core_of(PyObject* self) {
    auto* object = reinterpret_cast<CoreObject*>(self);
    if (object->core && object->forks == forks() && !object->is_stopped) return object->core;
    PyErr_SetString(state.stopped, object->forks == forks() ? "this core was stopped"
                                                            : "a forked child has none of its parent's cores");
    return nullptr;
}

PyObject* refuse(const char* why) {
    PyErr_SetString(state.error, why);
    return nullptr;
}

bool is_frame(const char* head, Py_ssize_t size, const std::vector<Span>& pieces = {}) {
    auto whole = static_cast<uint64_t>(size);
    for (auto& piece : pieces) whole += piece.size;
    if (whole && frame_bytes(head, static_cast<size_t>(size)) == whole) return true;
    PyErr_SetString(PyExc_ValueError, "these bytes are not one whole frame");
    return false;
}

void name_call(std::string& head, uint64_t number) {
    std::memcpy(head.data() + offsetof(Header, call_id), &number, sizeof number);
}

enum class Left { YES, ENDED, REFUSED, LATE, INTERRUPTED };

// Send a frame. Waits for room, and for large pieces, without the interpreter; Python's signal handlers run meanwhile.
Left send(Core* core, uint32_t link, Frame& frame, bool patient, bool more, double deadline) {
    std::shared_ptr<Sending> sending;
    bool is_large = !frame.pieces.empty();
    if (is_large && (!patient || frame.descriptor.get() >= 0)) {
        for (auto& piece : frame.pieces) frame.head.append(piece.bytes, piece.size);
        frame.pieces.clear();
        is_large = false;
    }
    if (is_large) {
        sending = std::make_shared<Sending>();
        sending->wake = [self = this_waiter().shared_from_this()] { self->ring(); };
    }
    for (;;) {
        Core::Sent sent;
        if (is_large) {  // to oneself, it is copied
            WithoutInterpreter none;
            sent = core->queue(link, frame, patient, sending, false);
        } else {  // it takes a microsecond, so the interpreter is kept
            sent = core->queue(link, frame, patient, sending, more);
        }
        if (sent == Core::Sent::ENDED) return Left::ENDED;
        if (sent == Core::Sent::REFUSED) return Left::REFUSED;
        if (sent == Core::Sent::YES) break;
        End end;
        {
            WithoutInterpreter none;
            core->drain(link);
            end = core->wait_for_room(link, deadline, patience());
        }
        if (end == End::LATE) return Left::LATE;
        if (end == End::STOPPED) return Left::ENDED;
        if (end == End::SIGNAL && is_interrupted()) return Left::INTERRUPTED;
    }
    if (!is_large) return Left::YES;
    for (;;) {
        End end;
        bool whole = false;
        {
            WithoutInterpreter none;
            end = core->wait_for_sending(sending, deadline, patience());
            if (end == End::LATE || end == End::STOPPED) whole = core->give_up(link, sending);
        }
        if (end == End::READY) return sending->failed ? Left::ENDED : Left::YES;
        if (end == End::STOPPED) return Left::ENDED;
        if (end == End::LATE) return whole ? Left::YES : Left::LATE;
        if (is_interrupted()) {
            WithoutInterpreter none;
            core->give_up(link, sending);
            return Left::INTERRUPTED;
        }
    }
}

// The call is over. An error that is on its way stays.
void forget(Core* core, uint64_t number) {
    PyObject *type, *what, *trace;
    PyErr_Fetch(&type, &what, &trace);
    void* value;
    {
        WithoutInterpreter none;
        value = core->cancel(number);
    }
    Py_XDECREF(static_cast<PyObject*>(value));
    PyErr_Restore(type, what, trace);
}

// The same of a call's request: unless it is sent, the call is over.
Left send(Core* core, uint32_t link, Frame& frame, bool patient, bool more, double deadline, uint64_t call) {
    Left left;
    try {
        left = send(core, link, frame, patient, more, deadline);
    } catch (const std::exception&) {
        if (call) forget(core, call);
        throw;
    }
    if (call && left != Left::YES) forget(core, call);
    return left;
}

PyObject* outcome(CoreObject* self, uint8_t kind, uint32_t link, uint64_t number, uint32_t flags) {
    Message message = news(kind, link, number, flags);
    return arrived(self, message);
}

// Wait for an answer; with `forgets`, the call is over however that ends.
PyObject* wait_for(CoreObject* self, uint32_t link, uint64_t number, double deadline, bool forgets) {
    for (;;) {
        Message answer;
        void* value = nullptr;
        bool unknown = false;
        End end;
        {
            WithoutInterpreter none;
            end = self->core->wait(number, deadline, patience(), answer, value, unknown);
        }
        if (end == End::READY) {
            if (unknown && self->is_stopped) end = End::STOPPED;
            else if (unknown) return refuse("there is no such call: it is over");
        }
        if (end == End::READY) {
            if (value) return static_cast<PyObject*>(value);
            return arrived(self, answer);
        }
        if (end == End::SIGNAL && !is_interrupted()) continue;
        if (forgets && end != End::LATE) forget(self->core, number);
        if (end == End::SIGNAL) {
            if (!forgets) self->core->forsake(number);
            return nullptr;
        }
        if (end == End::STOPPED) {
            PyErr_SetString(state.stopped, "this core was stopped");
            return nullptr;
        }
        return outcome(self, OVERDUE, link, number, 0);
    }
}

// The number that the caller has given its call; 0: none.
uint64_t call_in(const char* head) {
    uint64_t number;
    std::memcpy(&number, head + offsetof(Header, call_id), sizeof number);
    return number;
}

PyObject* core_call(PyObject* self, PyObject* args, PyObject* keywords) {
    static const char* names[] = {"link", "head", "pieces", "deadline", nullptr};
    unsigned int link;
    const char* head;
    Py_ssize_t size;
    PyObject* sequence = nullptr;
    double deadline = NEVER;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "Iy#|Od:call", const_cast<char**>(names), &link, &head, &size,
                                     &sequence, &deadline))
        return nullptr;
    Core* core = core_of(self);
    Pieces pieces;
    if (!core || !pieces.take(sequence) || !is_frame(head, size, pieces.spans())) return nullptr;
    auto* object = reinterpret_cast<CoreObject*>(self);
    uint64_t number = core->enter(link, call_in(head), deadline, false, &this_waiter());
    if (!number) return outcome(object, ENDED, link, call_in(head), NOT_SENT);
    Frame frame{std::string(head, static_cast<size_t>(size)), pieces.spans(), Descriptor()};
    name_call(frame.head, number);
    Left left = send(core, link, frame, true, false, deadline, number);
    if (left == Left::YES) return wait_for(object, link, number, deadline, true);
    if (left == Left::INTERRUPTED || !core_of(self)) return nullptr;
    if (left == Left::LATE) return outcome(object, OVERDUE, link, number, NOT_SENT);
    return outcome(object, ENDED, link, number, NOT_SENT);
}

PyObject* core_post(PyObject* self, PyObject* args, PyObject* keywords) {
    static const char* names[] = {"link", "head", "pieces", "deadline", "told", "more", "patient", "descriptor", nullptr};
    unsigned int link;
    const char* head;
    Py_ssize_t size;
    PyObject* sequence = nullptr;
    double deadline = NEVER;
    int told = 0, more = 0, patient = 1, descriptor = -1;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "Iy#|Od$pppi:post", const_cast<char**>(names), &link, &head, &size,
                                     &sequence, &deadline, &told, &more, &patient, &descriptor))
        return nullptr;
    Core* core = core_of(self);
    Pieces pieces;
    if (!core || !pieces.take(sequence) || !is_frame(head, size, pieces.spans())) return nullptr;
    Frame frame{std::string(head, static_cast<size_t>(size)), pieces.spans(), Descriptor()};
    if (descriptor >= 0) {
        frame.descriptor.reset(dup(descriptor));
        if (frame.descriptor.get() < 0) return PyErr_SetFromErrno(PyExc_OSError);
        uint32_t flags;
        std::memcpy(&flags, frame.head.data() + offsetof(Header, flags), sizeof flags);
        flags |= CARRIES;
        std::memcpy(frame.head.data() + offsetof(Header, flags), &flags, sizeof flags);
    }
    uint64_t number = 0;
    if (head[offsetof(Header, kind)] == REQUEST) {
        number = core->enter(link, call_in(head), deadline, told, nullptr);
        if (!number) return refuse("the link has ended: not sent");
        name_call(frame.head, number);
    }
    Left left = send(core, link, frame, patient, more, deadline, number);
    if (left == Left::YES) return PyLong_FromUnsignedLongLong(number);
    if (left == Left::INTERRUPTED || !core_of(self)) return nullptr;
    if (left == Left::LATE) return refuse("there was no room before the deadline: not sent");
    if (left == Left::REFUSED) return refuse("this connection carries no descriptors");
    return refuse("the link has ended: not sent");
}

PyObject* core_answer(PyObject* self, PyObject* args, PyObject* keywords) {
    static const char* names[] = {"link", "number", "head", "pieces", "more", nullptr};
    unsigned int link;
    unsigned long long number;
    const char* head;
    Py_ssize_t size;
    PyObject* sequence = nullptr;
    int more = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "IKy#|O$p:answer", const_cast<char**>(names), &link, &number, &head,
                                     &size, &sequence, &more))
        return nullptr;
    Core* core = core_of(self);
    Pieces pieces;
    if (!core || !pieces.take(sequence) || !is_frame(head, size, pieces.spans())) return nullptr;
    Frame frame{std::string(head, static_cast<size_t>(size)), pieces.spans(), Descriptor()};
    name_call(frame.head, number);
    core->finished(link, number);
    Left left = send(core, link, frame, true, more, NEVER);
    if (left == Left::INTERRUPTED || !core_of(self)) return nullptr;
    if (left != Left::YES) return refuse("the link has ended: not sent");
    Py_RETURN_NONE;
}

// ---------------------------------------------------------------------- links

PyObject* core_open_link(PyObject* self, PyObject* args) {
    int to_self = 0;
    if (!PyArg_ParseTuple(args, "|p:open_link", &to_self)) return nullptr;
    Core* core = core_of(self);
    return core ? PyLong_FromUnsignedLong(core->open_link(to_self)) : nullptr;
}

PyObject* core_attach(PyObject* self, PyObject* args, PyObject* keywords) {
    unsigned int link;
    PyObject *connection, *instead = nullptr;
    unsigned long long received = 0;
    const char* first = "";
    Py_ssize_t first_size = 0;
    static const char* names[] = {"link", "connection", "received", "replacements", "first", nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "IO|KOy#:attach", const_cast<char**>(names), &link, &connection,
                                     &received, &instead, &first, &first_size))
        return nullptr;
    Core* core = core_of(self);
    if (!core) return nullptr;
    std::vector<std::string> replacements;
    Py_ssize_t count = instead ? PySequence_Size(instead) : 0;
    if (count < 0) return nullptr;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject* item = PySequence_GetItem(instead, i);
        char* bytes = nullptr;
        Py_ssize_t size = 0;
        bool good = item && (item == Py_None || (PyBytes_AsStringAndSize(item, &bytes, &size) == 0 && is_frame(bytes, size)));
        if (good) replacements.emplace_back(bytes ? bytes : "", static_cast<size_t>(size));
        Py_XDECREF(item);
        if (!good) return nullptr;
    }
    std::shared_ptr<Pump> pump;
    long fd;
    if (PyLong_Check(connection)) {
        fd = PyLong_AsLong(connection);
    } else {
        PyObject* number = PyObject_CallMethod(connection, "fileno", nullptr);
        fd = number ? PyLong_AsLong(number) : -1;
        Py_XDECREF(number);
        pump = std::make_shared<PythonPump>(connection);
    }
    if (fd < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a connection is the descriptor of a stream socket");
        return nullptr;
    }
    bool good;
    uint64_t again = 0;
    std::string before(first, static_cast<size_t>(first_size));
    {
        WithoutInterpreter none;
        good = core->attach(link, static_cast<int>(fd), std::move(pump), received, std::move(replacements), before, &again);
    }
    if (!good) return refuse("the link has ended, or the peer counts frames that cannot be");
    return PyLong_FromUnsignedLongLong(again);
}

PyObject* core_lost(PyObject* self, PyObject* args) {
    unsigned int link;
    unsigned long long received;
    if (!PyArg_ParseTuple(args, "IK:lost", &link, &received)) return nullptr;
    Core* core = core_of(self);
    if (!core) return nullptr;
    std::vector<std::string> heads;
    if (!core->lost(link, received, heads)) return refuse("the peer counts frames that cannot be, or is connected");
    PyObject* list = PyList_New(0);
    for (auto& head : heads) {
        PyObject* item = PyBytes_FromStringAndSize(head.data(), static_cast<Py_ssize_t>(head.size()));
        if (!list || !item || PyList_Append(list, item)) Py_CLEAR(list);
        Py_XDECREF(item);
        if (!list) break;
    }
    return list;
}

// A method whose only argument is a link, run without the interpreter.
template <auto Method>
PyObject* of_link(PyObject* self, PyObject* argument) {
    unsigned long link = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred()) return nullptr;
    Core* core = core_of(self);
    if (!core) return nullptr;
    using Result = decltype((core->*Method)(0));
    if constexpr (std::is_void_v<Result>) {
        {
            WithoutInterpreter none;
            (core->*Method)(static_cast<uint32_t>(link));
        }
        Py_RETURN_NONE;
    } else {
        Result result;
        {
            WithoutInterpreter none;
            result = (core->*Method)(static_cast<uint32_t>(link));
        }
        return PyLong_FromUnsignedLongLong(result);
    }
}

PyObject* core_send_last(PyObject* self, PyObject* args) {
    unsigned int link;
    const char* bytes;
    Py_ssize_t size;
    long long received = -1;
    if (!PyArg_ParseTuple(args, "Iy#|L:send_last", &link, &bytes, &size, &received)) return nullptr;
    Core* core = core_of(self);
    if (!core || !is_frame(bytes, size)) return nullptr;
    return PyBool_FromLong(core->send_last(link, std::string(bytes, static_cast<size_t>(size)), received));
}

PyObject* core_traffic(PyObject* self, PyObject* argument) {
    unsigned long link = PyLong_AsUnsignedLong(argument);
    Core* core = PyErr_Occurred() ? nullptr : core_of(self);
    if (!core) return nullptr;
    Traffic traffic;
    {
        WithoutInterpreter none;
        traffic = core->traffic(static_cast<uint32_t>(link));
    }
    PyObject* items[] = {
        PyLong_FromUnsignedLongLong(traffic.sent_bytes), PyLong_FromUnsignedLongLong(traffic.received_bytes),
        PyLong_FromUnsignedLongLong(traffic.frames),     PyLong_FromUnsignedLongLong(traffic.unsent_bytes),
        PyLong_FromUnsignedLongLong(traffic.held),       PyFloat_FromDouble(traffic.heard),
    };
    return sequence_of(state.traffic, items);
}

HandleObject* handle_of(PyObject* argument) {
    if (!PyObject_TypeCheck(argument, state.handle)) {
        PyErr_SetString(PyExc_TypeError, "this is no handle of a frame");
        return nullptr;
    }
    auto* handle = reinterpret_cast<HandleObject*>(argument);
    if (!handle->is_placed) return handle;
    PyErr_SetString(state.error, "this frame is placed already");
    return nullptr;
}

PyObject* core_placed(PyObject* self, PyObject* argument) {
    HandleObject* handle = handle_of(argument);
    Core* core = handle ? core_of(self) : nullptr;
    if (!core) return nullptr;
    handle->is_placed = true;
    core->placed(handle->message.link);
    Py_RETURN_NONE;
}

template <auto Method>
PyObject* put_back(PyObject* self, PyObject* argument) {
    HandleObject* handle = handle_of(argument);
    Core* core = handle ? core_of(self) : nullptr;
    if (!core) return nullptr;
    handle->is_placed = true;
    Message message;
    static_cast<Content&>(message) = std::move(handle->message);
    (core->*Method)(std::move(message));
    Py_RETURN_NONE;
}

// ---------------------------------------------------------------------- calls and slots

PyObject* core_wait(PyObject* self, PyObject* args) {
    unsigned long long number;
    double deadline = NEVER;
    if (!PyArg_ParseTuple(args, "K|d:wait", &number, &deadline) || !core_of(self)) return nullptr;
    return wait_for(reinterpret_cast<CoreObject*>(self), 0, number, deadline, false);
}

PyObject* core_done(PyObject* self, PyObject* argument) {
    unsigned long long number = PyLong_AsUnsignedLongLong(argument);
    Core* core = PyErr_Occurred() ? nullptr : core_of(self);
    return core ? PyBool_FromLong(core->done(number)) : nullptr;
}

PyObject* core_tell(PyObject* self, PyObject* argument) {
    unsigned long long number = PyLong_AsUnsignedLongLong(argument);
    Core* core = PyErr_Occurred() ? nullptr : core_of(self);
    if (!core) return nullptr;
    core->tell(number);
    Py_RETURN_NONE;
}

PyObject* core_cancel(PyObject* self, PyObject* argument) {
    unsigned long long number = PyLong_AsUnsignedLongLong(argument);
    Core* core = PyErr_Occurred() ? nullptr : core_of(self);
    if (!core) return nullptr;
    forget(core, number);
    Py_RETURN_NONE;
}

PyObject* core_settle(PyObject* self, PyObject* args) {
    unsigned long long number;
    PyObject* value;
    if (!PyArg_ParseTuple(args, "KO:settle", &number, &value)) return nullptr;
    Core* core = core_of(self);
    if (!core) return nullptr;
    Py_INCREF(value);
    Py_XDECREF(static_cast<PyObject*>(core->settle(number, value)));
    Py_RETURN_NONE;
}

template <auto Method>
PyObject* of_number(PyObject* self, PyObject* args) {
    unsigned int link;
    unsigned long long number;
    if (!PyArg_ParseTuple(args, "IK", &link, &number)) return nullptr;
    Core* core = core_of(self);
    if (!core) return nullptr;
    (core->*Method)(link, number);
    Py_RETURN_NONE;
}

PyObject* core_take(PyObject* self, PyObject* args) {
    unsigned int link;
    unsigned long long number;
    double deadline = NEVER;
    if (!PyArg_ParseTuple(args, "IK|d:take", &link, &number, &deadline)) return nullptr;
    for (;;) {
        Core* core = core_of(self);
        if (!core) return nullptr;
        Message letter;
        bool woken = false;
        End end;
        {
            WithoutInterpreter none;
            end = core->take(link, number, deadline, patience(), letter, woken);
        }
        if (end == End::READY && !woken) return arrived(reinterpret_cast<CoreObject*>(self), letter);
        if (end == End::SIGNAL && !is_interrupted()) continue;
        if (end == End::SIGNAL) return nullptr;
        Py_RETURN_NONE;
    }
}

// ---------------------------------------------------------------------- workers and the event thread

PyObject* core_next(PyObject* self, PyObject* args) {
    double deadline = NEVER;
    if (!PyArg_ParseTuple(args, "|d:next", &deadline)) return nullptr;
    for (bool came = false;;) {
        auto* object = reinterpret_cast<CoreObject*>(self);
        if (object->is_stopped) Py_RETURN_NONE;
        Core* core = core_of(self);
        if (!core) return nullptr;
        Work work;
        if (core->pick(work, came)) {
            if (work.task) return static_cast<PyObject*>(work.task);
            return arrived(object, work.message);
        }
        End end;
        {
            WithoutInterpreter none;
            end = core->wait_for_work(deadline, patience());
        }
        came = end == End::READY;
        if (end == End::SIGNAL && is_interrupted()) return nullptr;
        if (end == End::LATE || end == End::STOPPED) Py_RETURN_NONE;
    }
}

PyObject* core_work(PyObject* self, PyObject* task) {
    Core* core = core_of(self);
    if (!core) return nullptr;
    Py_INCREF(task);
    core->put_task(task);
    Py_RETURN_NONE;
}

template <auto Method>
PyObject* plain(PyObject* self, PyObject*) {
    Core* core = core_of(self);
    if (!core) return nullptr;
    (core->*Method)();
    Py_RETURN_NONE;
}

PyObject* core_limit_queue(PyObject* self, PyObject* argument) {
    size_t most = PyLong_AsSize_t(argument);
    Core* core = PyErr_Occurred() ? nullptr : core_of(self);
    if (!core) return nullptr;
    core->limit_queue(most);
    Py_RETURN_NONE;
}

PyObject* core_fileno(PyObject* self, PyObject*) {
    Core* core = core_of(self);
    return core ? PyLong_FromLong(core->events_fd()) : nullptr;
}

PyObject* core_events(PyObject* self, PyObject*) {
    Core* core = core_of(self);
    if (!core) return nullptr;
    std::deque<Message> messages;
    {
        WithoutInterpreter none;
        core->take_events(messages);
    }
    return list_of(reinterpret_cast<CoreObject*>(self), messages);
}

PyObject* core_to_place(PyObject* self, PyObject*) {
    Core* core = core_of(self);
    if (!core) return nullptr;
    std::deque<Message> messages;
    core->to_place(messages);
    return list_of(reinterpret_cast<CoreObject*>(self), messages);
}

PyObject* core_queued(PyObject* self, PyObject*) {
    Core* core = core_of(self);
    if (!core) return nullptr;
    auto messages = core->queued();
    return list_of(reinterpret_cast<CoreObject*>(self), messages);
}

PyObject* core_counts(PyObject* self, PyObject*) {
    Core* core = core_of(self);
    if (!core) return nullptr;
    Counts counts = core->counts();
    PyObject* items[] = {
        PyLong_FromUnsignedLongLong(counts.pending),      PyLong_FromUnsignedLongLong(counts.queued),
        PyLong_FromUnsignedLongLong(counts.running),      PyLong_FromUnsignedLongLong(counts.last_call),
        PyLong_FromUnsignedLongLong(counts.last_request),
    };
    return sequence_of(state.counts, items);
}

PyObject* core_trim(PyObject* self, PyObject*) {
    Core* core = core_of(self);
    if (!core) return nullptr;
    core->pool->trim();
    Py_RETURN_NONE;
}

PyObject* core_stop(PyObject* self, PyObject*) {
    auto* object = reinterpret_cast<CoreObject*>(self);
    if (object->is_stopped || object->forks != forks()) Py_RETURN_NONE;
    object->is_stopped = true;
    std::vector<void*> tasks;
    {
        WithoutInterpreter none;
        tasks = object->core->stop();
    }
    for (void* task : tasks) Py_DECREF(static_cast<PyObject*>(task));
    Py_RETURN_NONE;
}

PyObject* core_close_after_fork(PyObject* self, PyObject*) {
    auto* object = reinterpret_cast<CoreObject*>(self);
    if (object->forks != forks() && object->core) {
        object->core->close_after_fork();
        object->core = nullptr;  // not freed: what it holds may be half changed
    }
    Py_RETURN_NONE;
}

PyObject* core_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    static const char* names[] = {"memory_limit", "backlog_limit", "busy_wait_s", nullptr};
    Py_ssize_t memory_limit = 1 << 30, backlog_limit = 4 << 20;
    double busy_wait_s = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|nnd:Core", const_cast<char**>(names), &memory_limit, &backlog_limit,
                                     &busy_wait_s))
        return nullptr;
    if (memory_limit < 0 || backlog_limit < 1 || !(busy_wait_s >= 0)) {
        PyErr_SetString(PyExc_ValueError, "a core's limits are not negative");
        return nullptr;
    }
    return without_exceptions([=]() -> PyObject* {
        auto core = std::make_shared<Core>(static_cast<size_t>(memory_limit), static_cast<size_t>(backlog_limit), busy_wait_s);
        auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
        PyObject* made = allocate(type, 0);
        if (!made) return nullptr;
        auto* object = reinterpret_cast<CoreObject*>(made);
        object->forks = forks();
        object->is_stopped = false;
        object->core = core.get();
        object->owner = new std::shared_ptr<Core>(std::move(core));
        return made;
    });
}

void core_dealloc(PyObject* self) {
    auto* object = reinterpret_cast<CoreObject*>(self);
    PyObject *type, *what, *trace;  // of whoever dropped it, for tasks have destructors, too
    PyErr_Fetch(&type, &what, &trace);
    Py_XDECREF(core_stop(self, nullptr));
    PyErr_Restore(type, what, trace);
    if (object->core && object->forks == forks()) {
        auto* owner = object->owner;
        WithoutInterpreter none;
        delete owner;
    }
    PyTypeObject* own_type = Py_TYPE(self);
    reinterpret_cast<freefunc>(PyType_GetSlot(own_type, Py_tp_free))(self);
    Py_DECREF(own_type);
}

#define WITH_KEYWORDS(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(safe_with_keywords<function>)), METH_VARARGS | METH_KEYWORDS, nullptr

PyMethodDef core_methods[] = {
    {"open_link", safe<core_open_link>, METH_VARARGS, nullptr},
    {"attach", WITH_KEYWORDS(core_attach)},
    {"detach", safe<of_link<&Core::detach>>, METH_O, nullptr},
    {"lost", safe<core_lost>, METH_VARARGS, nullptr},
    {"admit", safe<of_link<&Core::admit>>, METH_O, nullptr},
    {"pause_behind", safe<put_back<&Core::pause_behind>>, METH_O, nullptr},
    {"unpause", safe<of_link<&Core::unpause>>, METH_O, nullptr},
    {"defer", safe<put_back<&Core::defer>>, METH_O, nullptr},
    {"recall", safe<of_link<&Core::recall>>, METH_O, nullptr},
    {"placed", safe<core_placed>, METH_O, nullptr},
    {"end_sending", safe<of_link<&Core::end_sending>>, METH_O, nullptr},
    {"end", safe<of_link<&Core::end_link>>, METH_O, nullptr},
    {"sleep", safe<of_link<&Core::sleep>>, METH_O, nullptr},
    {"send_last", safe<core_send_last>, METH_VARARGS, nullptr},
    {"go_on", safe<of_link<&Core::go_on>>, METH_O, nullptr},
    {"traffic", safe<core_traffic>, METH_O, nullptr},
    {"flush", safe<of_link<static_cast<void (Core::*)(uint32_t)>(&Core::drain)>>, METH_O, nullptr},
    {"call", WITH_KEYWORDS(core_call)},
    {"post", WITH_KEYWORDS(core_post)},
    {"answer", WITH_KEYWORDS(core_answer)},
    {"finished", safe<of_number<&Core::finished>>, METH_VARARGS, nullptr},
    {"wait", safe<core_wait>, METH_VARARGS, nullptr},
    {"done", safe<core_done>, METH_O, nullptr},
    {"tell", safe<core_tell>, METH_O, nullptr},
    {"settle", safe<core_settle>, METH_VARARGS, nullptr},
    {"cancel", safe<core_cancel>, METH_O, nullptr},
    {"open_slot", safe<of_number<&Core::open_slot>>, METH_VARARGS, nullptr},
    {"close_slot", safe<of_number<&Core::close_slot>>, METH_VARARGS, nullptr},
    {"wake", safe<of_number<&Core::wake_slot>>, METH_VARARGS, nullptr},
    {"take", safe<core_take>, METH_VARARGS, nullptr},
    {"next", safe<core_next>, METH_VARARGS, nullptr},
    {"work", safe<core_work>, METH_O, nullptr},
    {"begin_wait", safe<plain<&Core::begin_wait>>, METH_NOARGS, nullptr},
    {"end_wait", safe<plain<&Core::end_wait>>, METH_NOARGS, nullptr},
    {"limit_queue", safe<core_limit_queue>, METH_O, nullptr},
    {"queued", safe<core_queued>, METH_NOARGS, nullptr},
    {"fileno", safe<core_fileno>, METH_NOARGS, nullptr},
    {"events", safe<core_events>, METH_NOARGS, nullptr},
    {"to_place", safe<core_to_place>, METH_NOARGS, nullptr},
    {"counts", safe<core_counts>, METH_NOARGS, nullptr},
    {"trim", safe<core_trim>, METH_NOARGS, nullptr},
    {"stop", safe<core_stop>, METH_NOARGS, nullptr},
    {"close_after_fork", safe<core_close_after_fork>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot core_slots[] = {{Py_tp_new, reinterpret_cast<void*>(core_new)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(core_dealloc)},
                            {Py_tp_methods, core_methods},
                            {0, nullptr}};
PyType_Spec core_spec = {"farcall.core._core.Core", sizeof(CoreObject), 0, Py_TPFLAGS_DEFAULT, core_slots};

PyStructSequence_Field arrived_fields[] = {{"kind", nullptr},    {"flags", nullptr},   {"link", nullptr},
                                           {"number", nullptr},  {"function", nullptr}, {"notes", nullptr},
                                           {"payload", nullptr}, {"buffers", nullptr}, {"handle", nullptr},
                                           {"descriptor", nullptr}, {"at", nullptr},   {nullptr, nullptr}};
PyStructSequence_Desc arrived_description = {"farcall.core._core.Arrived", nullptr, arrived_fields, 11};
PyStructSequence_Field counts_fields[] = {{"pending", nullptr},   {"queued", nullptr},       {"running", nullptr},
                                          {"last_call", nullptr}, {"last_request", nullptr}, {nullptr, nullptr}};
PyStructSequence_Desc counts_description = {"farcall.core._core.Counts", nullptr, counts_fields, 5};
PyStructSequence_Field traffic_fields[] = {{"sent_bytes", nullptr},   {"received_bytes", nullptr}, {"frames", nullptr},
                                           {"unsent_bytes", nullptr}, {"held", nullptr},           {"heard", nullptr},
                                           {nullptr, nullptr}};
PyStructSequence_Desc traffic_description = {"farcall.core._core.Traffic", nullptr, traffic_fields, 6};

// The errors are those of contract.py, so that whoever catches them need not know which core raised them.
PyObject* set_errors(PyObject*, PyObject* args) {
    PyObject *error, *stopped;
    if (!PyArg_ParseTuple(args, "OO:set_errors", &error, &stopped)) return nullptr;
    Py_INCREF(error);
    Py_INCREF(stopped);
    state.error = error;
    state.stopped = stopped;
    Py_RETURN_NONE;
}

PyObject* in_wait(PyObject*, PyObject*) { return PyBool_FromLong(std::exchange(state.is_waiting, false)); }

PyMethodDef module_methods[] = {
    {"set_errors", set_errors, METH_VARARGS, nullptr},
    {"in_wait", in_wait, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_core", nullptr, -1, module_methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__core() {
    PyObject* module = PyModule_Create(&module_definition);
    if (!module) return nullptr;
    state.memory = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&memory_spec));
    state.handle = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&handle_spec));
    state.arrived = reinterpret_cast<PyObject*>(PyStructSequence_NewType(&arrived_description));
    state.counts = reinterpret_cast<PyObject*>(PyStructSequence_NewType(&counts_description));
    state.traffic = reinterpret_cast<PyObject*>(PyStructSequence_NewType(&traffic_description));
    state.error = state.stopped = Py_NewRef(PyExc_RuntimeError);
    PyObject* core = PyType_FromSpec(&core_spec);
    if (!state.memory || !state.handle || !state.arrived || !state.counts || !state.traffic || !core ||
        PyModule_AddObjectRef(module, "Core", core) || PyModule_AddObjectRef(module, "Arrived", state.arrived)) {
        Py_DECREF(module);
        return nullptr;
    }
    forks();  // registers its handler
    return module;
}

/* frames.py and frame_decoder.py, compiled in part: small frames to bytes, and frames that have come whole.

   The layout of a frame is told in frames.py. This file knows no more than a call needs: a frame without buffers is
   written, and one without inline buffers is read. All else, and every frame that is not whole or makes no sense, it
   leaves to the Python code, which says what is wrong. Of Python it uses only the limited API: one library serves every
   Python from 3.11 on.

   Bytes may come from anybody: every length is compared with what is left before it is used. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if PY_BIG_ENDIAN
#error "the numbers of a frame are written as little-endian machines keep them"
#endif

enum { INTERFACE = 2, VERSION = 2, REQUEST = 1, LETTER = 5, MAX_FUNCTION_BYTES = 4096 };

typedef struct {
    char magic[2];
    uint8_t version, kind;
    uint32_t flags;
    uint64_t call_id, payload_bytes;
    uint32_t function_bytes, notes_bytes, buffer_count, number;
} Header;

typedef struct {
    uint64_t size_bytes, segment_id, offset;
} Entry;

_Static_assert(sizeof(Header) == 40 && sizeof(Entry) == 24, "the layout of frames.py");

/* ------------------------------------------------------------------ writing */

/* A number that fits, as a struct of Python's would demand. */
static int take_number(PyObject *object, uint64_t most, uint64_t *number)
{
    *number = PyLong_AsUnsignedLongLong(object);
    if (*number == UINT64_MAX && PyErr_Occurred())
        return 0;
    if (*number > most) {
        PyErr_SetString(PyExc_OverflowError, "a field of a frame is too large");
        return 0;
    }
    return 1;
}

static PyObject *encode_small(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    uint64_t kind, flags, call_id;
    char *parts[3];
    Py_ssize_t sizes[3];
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "encode_small takes six arguments");
        return NULL;
    }
    if (!take_number(arguments[0], UINT8_MAX, &kind) || !take_number(arguments[1], UINT32_MAX, &flags) ||
        !take_number(arguments[2], UINT64_MAX, &call_id))
        return NULL;
    for (int i = 0; i < 3; i++) {
        if (PyBytes_AsStringAndSize(arguments[3 + i], &parts[i], &sizes[i]) < 0)
            return NULL;
    }
    if (sizes[0] > UINT32_MAX || sizes[1] > UINT32_MAX || sizes[2] > PY_SSIZE_T_MAX / 2) {
        PyErr_SetString(PyExc_OverflowError, "a part of a frame is too large");
        return NULL;
    }
    Header header = {
        .magic = {'f', 'c'},
        .version = VERSION,
        .kind = (uint8_t)kind,
        .flags = (uint32_t)flags,
        .call_id = call_id,
        .payload_bytes = (uint64_t)sizes[2],
        .function_bytes = (uint32_t)sizes[0],
        .notes_bytes = (uint32_t)sizes[1],
    };
    PyObject *frame = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)sizeof header + sizes[0] + sizes[1] + sizes[2]);
    if (frame == NULL)
        return NULL;
    char *place = PyBytes_AsString(frame);
    memcpy(place, &header, sizeof header);
    place += sizeof header;
    for (int i = 0; i < 3; i++) {
        memcpy(place, parts[i], (size_t)sizes[i]);
        place += sizes[i];
    }
    return frame;
}

static PyObject *numbered(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int is_one = count == 2 && PyBytes_CheckExact(arguments[0]);
    if (count != 2 || (!is_one && !PyList_CheckExact(arguments[0]))) {
        PyErr_SetString(PyExc_TypeError, "numbered takes a frame, or a list of frames, and a number");
        return NULL;
    }
    uint32_t number = (uint32_t)PyLong_AsUnsignedLongLongMask(arguments[1]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *frames = arguments[0];
    Py_ssize_t frame_count = is_one ? 1 : PyList_Size(frames), size, total = 0;
    char *bytes;
    for (Py_ssize_t i = 0; i < frame_count; i++) {
        if (PyBytes_AsStringAndSize(is_one ? frames : PyList_GetItem(frames, i), &bytes, &size) < 0)
            return NULL;
        if (size < (Py_ssize_t)sizeof(Header)) {
            PyErr_SetString(PyExc_ValueError, "a frame has no header");
            return NULL;
        }
        if (size > PY_SSIZE_T_MAX - total)
            return PyErr_NoMemory();
        total += size;
    }
    PyObject *joined = PyBytes_FromStringAndSize(NULL, total);
    if (joined == NULL)
        return NULL;
    char *place = PyBytes_AsString(joined);
    for (Py_ssize_t i = 0; i < frame_count; i++, number++) { /* the interpreter is ours: the list is what it was */
        PyBytes_AsStringAndSize(is_one ? frames : PyList_GetItem(frames, i), &bytes, &size);
        memcpy(place, bytes, (size_t)size);
        memcpy(place + offsetof(Header, number), &number, sizeof number);
        place += size;
    }
    return joined;
}

/* ------------------------------------------------------------------ reading */

/* The tickets of a frame, an empty tuple if it has no buffers; None if one of its buffers is inline. */
static PyObject *read_table(PyObject *make_ticket, const char *table, uint32_t count)
{
    Entry entry;
    for (uint32_t i = 0; i < count; i++) {
        memcpy(&entry, table + i * sizeof entry, sizeof entry);
        if (entry.segment_id == 0)
            return Py_NewRef(Py_None);
    }
    if (count == 0)
        return PyTuple_New(0);
    PyObject *tickets = PyList_New((Py_ssize_t)count);
    for (uint32_t i = 0; tickets != NULL && i < count; i++) {
        memcpy(&entry, table + i * sizeof entry, sizeof entry);
        PyObject *ticket = PyObject_CallFunction(
            make_ticket, "KKK", (unsigned long long)entry.size_bytes, (unsigned long long)entry.segment_id,
            (unsigned long long)entry.offset);
        if (ticket == NULL || PyList_SetItem(tickets, (Py_ssize_t)i, ticket) < 0)
            Py_CLEAR(tickets);
    }
    return tickets;
}

/* The frame whose parts lie behind its table. */
static PyObject *read_frame(PyObject *make_frame, const Header *header, const char *parts, PyObject *buffers)
{
    const char *notes = parts + header->function_bytes, *payload = notes + header->notes_bytes;
    PyObject *fields[] = {
        PyLong_FromLong(header->kind),
        PyLong_FromUnsignedLong(header->flags),
        PyLong_FromUnsignedLongLong(header->call_id),
        PyBytes_FromStringAndSize(parts, header->function_bytes),
        PyBytes_FromStringAndSize(notes, header->notes_bytes),
        PyBytes_FromStringAndSize(payload, (Py_ssize_t)header->payload_bytes),
    };
    enum { FIELD_COUNT = sizeof fields / sizeof fields[0] };
    PyObject *frame = NULL;
    int is_complete = 1;
    for (int i = 0; i < FIELD_COUNT; i++)
        is_complete &= fields[i] != NULL;
    if (is_complete)
        frame = PyObject_CallFunctionObjArgs(make_frame, fields[0], fields[1], fields[2], fields[3], fields[4], fields[5],
                                             buffers, NULL);
    for (int i = 0; i < FIELD_COUNT; i++)
        Py_XDECREF(fields[i]);
    return frame;
}

/* Append the frames at the beginning of `bytes` to the list, as far as they are whole and their numbers, from `number`
   on, are right; -1: an error. */
static Py_ssize_t take_frames(PyObject *make_frame, PyObject *make_ticket, const char *bytes, uint64_t left,
                              PyObject *frames, uint32_t number)
{
    const char *at = bytes;
    Header header;
    while (left >= sizeof header) {
        memcpy(&header, at, sizeof header);
        if (header.magic[0] != 'f' || header.magic[1] != 'c' || header.version != VERSION || header.kind < REQUEST ||
            header.kind > LETTER || header.number != number || header.function_bytes > MAX_FUNCTION_BYTES)
            break;
        /* None of these sums can overflow: the lengths but one have 32 bits, and that one is compared by itself. */
        uint64_t table_bytes = (uint64_t)header.buffer_count * sizeof(Entry);
        uint64_t small_bytes = sizeof header + table_bytes + header.function_bytes + header.notes_bytes;
        if (small_bytes > left || header.payload_bytes > left - small_bytes)
            break;
        PyObject *buffers = read_table(make_ticket, at + sizeof header, header.buffer_count);
        if (buffers == NULL)
            return -1;
        if (buffers == Py_None) {
            Py_DECREF(buffers);
            break;
        }
        PyObject *frame = read_frame(make_frame, &header, at + sizeof header + table_bytes, buffers);
        Py_DECREF(buffers);
        if (frame == NULL || PyList_Append(frames, frame) < 0) {
            Py_XDECREF(frame);
            return -1;
        }
        Py_DECREF(frame);
        number++;
        at += small_bytes + header.payload_bytes;
        left -= small_bytes + header.payload_bytes;
    }
    return at - bytes;
}

static PyObject *take_whole(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 7 || !PyList_CheckExact(arguments[5])) {
        PyErr_SetString(PyExc_TypeError, "take_whole takes seven arguments, the sixth of them a list");
        return NULL;
    }
    uint32_t number = (uint32_t)PyLong_AsUnsignedLongLongMask(arguments[6]);
    Py_ssize_t start = PyLong_AsSsize_t(arguments[3]), end = PyLong_AsSsize_t(arguments[4]), taken = -1;
    if (PyErr_Occurred())
        return NULL;
    Py_buffer staging; /* held: nobody can resize it meanwhile */
    if (PyObject_GetBuffer(arguments[2], &staging, PyBUF_SIMPLE) < 0)
        return NULL;
    if (start < 0 || start > end || end > staging.len)
        PyErr_SetString(PyExc_ValueError, "these bytes are not in the staging");
    else
        taken = take_frames(arguments[0], arguments[1], (const char *)staging.buf + start, (uint64_t)(end - start),
                            arguments[5], number);
    PyBuffer_Release(&staging);
    return taken < 0 ? NULL : PyLong_FromSsize_t(start + taken);
}

/* ------------------------------------------------------------------ the module */

static PyMethodDef functions[] = {
    {"encode_small", (PyCFunction)(void (*)(void))encode_small, METH_FASTCALL,
     "encode_small(kind, flags, call_id, function, notes, payload): the bytes of a frame without buffers."},
    {"numbered", (PyCFunction)(void (*)(void))numbered, METH_FASTCALL,
     "numbered(frames, number): a frame, or a list of frames, joined, each with its number."},
    {"take_whole", (PyCFunction)(void (*)(void))take_whole, METH_FASTCALL,
     "take_whole(Frame, Ticket, staging, start, end, frames, number): append the frames that have come whole; return "
     "their end."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_frames", "frames.py and frame_decoder.py, compiled in part.", -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__frames(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        Py_CLEAR(module);
    return module;
}

/* frames.py, compiled in part: a frame without buffers is written, which is all that most calls need.

   The layout of a frame is told in frames.py. Of Python this uses only the limited API: one library serves every Python
   from 3.11 on. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if PY_BIG_ENDIAN
#error "the numbers of a frame are written as little-endian machines keep them"
#endif

enum { INTERFACE = 3, VERSION = 3, REQUEST = 1, LETTER = 5, MAX_FUNCTION_BYTES = 4096 };

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

/* ------------------------------------------------------------------ the module */

static PyMethodDef functions[] = {
    {"encode_small", (PyCFunction)(void (*)(void))encode_small, METH_FASTCALL,
     "encode_small(kind, flags, call_id, function, notes, payload): the bytes of a frame without buffers."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_frames", "frames.py, compiled in part.", -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__frames(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        Py_CLEAR(module);
    return module;
}

/* flat.py, compiled: plain values and plain tensors to bytes and back. (And, at the end, weights/checksums.py.)

   The layout of the bytes is told there, and both write the same ones. What this file adds is DLPack's exchange API, by
   which torch describes a tensor, and makes one, without a Python object for each of its properties. It uses no header
   and no symbol of torch's, and of Python only the limited API: one library serves every Python from 3.11 on.

   Bytes may come from anybody: every length is compared with what is left before it is used. Whatever cannot be told
   in this form is no error: `write` returns None, and pickle takes the value. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if PY_BIG_ENDIAN
#error "the numbers of this form are written as little-endian machines keep them"
#endif

/* ------------------------------------------------------------------ DLPack, as far as it is used here */

typedef struct {
    uint32_t major, minor;
} Version;

typedef struct {
    int32_t kind, index;
} Device;

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} DataType;

typedef struct {
    void *data;
    Device device;
    int32_t dimensions;
    DataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t offset_bytes;
} Described;

typedef struct Managed {
    Version version;
    void *context;
    void (*delete)(struct Managed *);
    uint64_t flags;
    Described tensor;
} Managed;

typedef struct Exchange {
    Version version;
    struct Exchange *previous;
    void *allocate;
    void *managed_from_object;
    int (*object_from_managed)(Managed *, void **);
    int (*describe)(void *, Described *);
    void *current_stream;
} Exchange;

enum { DLPACK_MAJOR = 1, DLPACK_MINOR = 0, CPU = 1 };

/* ------------------------------------------------------------------ the form */

enum { VERSION = 5, MOST_DEPTH = 32, MOST_DIMENSIONS = 64, MOST_TEXT_BYTES = 1 << 16, REQUIRES_GRAD = 1, ALIGNMENT_BYTES = 64 };

/* By the number of a dtype on the wire (rebuild.py): its code and bits in DLPack, and torch's object for it. torch has
   more dtypes than DLPack has codes (int1 to int7): which one a tensor has, only that object says. */
static struct {
    uint8_t code, bits;
    PyObject *object;
} dtypes[] = {
    {2, 32, NULL}, {2, 64, NULL}, {2, 16, NULL}, {4, 16, NULL}, {0, 64, NULL}, {0, 32, NULL},
    {0, 16, NULL}, {0, 8, NULL},  {1, 8, NULL},  {6, 8, NULL},  {5, 64, NULL}, {5, 128, NULL},
};
enum { DTYPE_COUNT = sizeof dtypes / sizeof dtypes[0], COMPLEX = 5 };

static const Exchange *exchange;
static PyObject *tensor_type, *strided;
static PyObject *name_data_ptr, *name_dict, *name_dtype, *name_is_conj, *name_is_neg, *name_layout, *name_nbytes, *name_requires_grad,
    *name_untyped_storage;

/* ------------------------------------------------------------------ memory of a tensor, as a buffer */

typedef struct {
    PyObject_HEAD
    PyObject *storage;
    void *data;
    Py_ssize_t size;
} TensorMemory;

static PyTypeObject *memory_type;

static int memory_get(PyObject *self, Py_buffer *view, int flags)
{
    TensorMemory *memory = (TensorMemory *)self;
    return PyBuffer_FillInfo(view, self, memory->data, memory->size, 0, flags);
}

static void memory_free(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((TensorMemory *)self)->storage);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot memory_slots[] = {
    {Py_bf_getbuffer, memory_get},
    {Py_tp_dealloc, memory_free},
    {Py_tp_doc, "The memory of a tensor that is being sent; it keeps the storage alive."},
    {0, NULL},
};

static PyType_Spec memory_spec = {
    "farcall.serialize._speedups.TensorMemory",
    sizeof(TensorMemory),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    memory_slots,
};

static PyObject *memory_view(PyObject *storage, void *data, Py_ssize_t size)
{
    TensorMemory *memory = PyObject_New(TensorMemory, memory_type);
    if (memory == NULL)
        return NULL;
    memory->storage = Py_NewRef(storage);
    memory->data = data;
    memory->size = size;
    PyObject *view = PyMemoryView_FromObject((PyObject *)memory);
    Py_DECREF(memory);
    return view;
}

/* ------------------------------------------------------------------ writing */

typedef struct {
    PyObject *storage; /* held until the bytes are copied */
    const char *data;
    size_t size;
} Part;

typedef struct {
    PyObject *object;
    uint32_t number; /* of a tensor, which is held: from 1; 0: this must not come twice */
} Seen;

typedef struct {
    char *text; /* the description; small ones need no allocation */
    size_t used, room;
    Part *parts;
    size_t part_count, part_room, data_bytes;
    Seen *seen; /* what may come twice: a hash table without deletions */
    size_t seen_count, seen_room;
    uint32_t tensor_count;
    PyObject *tensors, *buffers, *references, *reference_class, *on_devices;
    size_t out_of_band_bytes;
    char first_text[512];
    Part first_parts[8];
    Seen first_seen[32];
} Writer;

typedef enum { FAILED = -1, NOT_FLAT = 0, WRITTEN = 1 } Outcome;

static char *claim(Writer *writer, size_t count)
{
    if (writer->room - writer->used < count) {
        size_t room = 2 * (writer->used + count);
        char *larger = malloc(room);
        if (larger == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        memcpy(larger, writer->text, writer->used);
        if (writer->text != writer->first_text)
            free(writer->text);
        writer->text = larger;
        writer->room = room;
    }
    char *place = writer->text + writer->used;
    writer->used += count;
    return place;
}

static Outcome put(Writer *writer, char tag, const void *value, size_t size)
{
    char *place = claim(writer, 1 + size);
    if (place == NULL)
        return FAILED;
    *place = tag;
    memcpy(place + 1, value, size);
    return WRITTEN;
}

static Outcome put_counted(Writer *writer, char tag, Py_ssize_t count, const char *content, size_t size)
{
    if (count > UINT32_MAX)
        return NOT_FLAT;
    char *place = claim(writer, 5 + size);
    if (place == NULL)
        return FAILED;
    uint32_t number = (uint32_t)count;
    *place = tag;
    memcpy(place + 1, &number, 4);
    memcpy(place + 5, content, size);
    return WRITTEN;
}

static Seen *slot_of(Seen *table, size_t room, const PyObject *object)
{
    size_t slot = ((uintptr_t)object >> 4) * 0x9E3779B1u & (room - 1);
    while (table[slot].object != NULL && table[slot].object != object)
        slot = (slot + 1) & (room - 1);
    return table + slot;
}

/* The entry of `object`, a new one if it was not met before; NULL: no memory. */
static Seen *look_up(Writer *writer, PyObject *object)
{
    if (2 * (writer->seen_count + 1) > writer->seen_room) {
        size_t room = 2 * writer->seen_room;
        Seen *larger = calloc(room, sizeof *larger);
        if (larger == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        for (size_t i = 0; i < writer->seen_room; i++)
            if (writer->seen[i].object != NULL)
                *slot_of(larger, room, writer->seen[i].object) = writer->seen[i];
        if (writer->seen != writer->first_seen)
            free(writer->seen);
        writer->seen = larger;
        writer->seen_room = room;
    }
    return slot_of(writer->seen, writer->seen_room, object);
}

/* NOT_FLAT: `object` has been met. Pickle keeps the identity of containers and storages, this form does not. */
static Outcome meet(Writer *writer, PyObject *object)
{
    Seen *entry = look_up(writer, object);
    if (entry == NULL)
        return FAILED;
    if (entry->object != NULL)
        return NOT_FLAT;
    entry->object = object;
    writer->seen_count++;
    return WRITTEN;
}

/* Takes over the reference to `storage`. */
static Outcome add_part(Writer *writer, PyObject *storage, const char *data, size_t size)
{
    if (writer->part_count == writer->part_room) {
        Part *larger = malloc(2 * writer->part_room * sizeof *larger);
        if (larger == NULL) {
            Py_DECREF(storage);
            PyErr_NoMemory();
            return FAILED;
        }
        memcpy(larger, writer->parts, writer->part_count * sizeof *larger);
        if (writer->parts != writer->first_parts)
            free(writer->parts);
        writer->parts = larger;
        writer->part_room *= 2;
    }
    writer->parts[writer->part_count++] = (Part){storage, data, size};
    writer->data_bytes += size;
    return WRITTEN;
}

/* Whether an attribute, or what a method returns, is the object `wanted`; FAILED where asking is an error. */
static int is_attribute(PyObject *object, PyObject *name, PyObject *wanted)
{
    PyObject *found = PyObject_GetAttr(object, name);
    Py_XDECREF(found);
    return found == NULL ? FAILED : found == wanted;
}

static int is_result(PyObject *object, PyObject *name, PyObject *wanted)
{
    PyObject *found = PyObject_CallMethodObjArgs(object, name, NULL);
    Py_XDECREF(found);
    return found == NULL ? FAILED : found == wanted;
}

/* What a method returns, which is a number that is not negative; -1 where asking is an error. */
static int64_t number_from(PyObject *object, PyObject *name)
{
    PyObject *found = PyObject_CallMethodObjArgs(object, name, NULL);
    int64_t number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return number;
}

static int has_attributes(PyObject *tensor)
{
    PyObject *attributes = PyObject_GetAttr(tensor, name_dict);
    if (attributes == NULL)
        return FAILED;
    Py_ssize_t count = PyObject_Size(attributes);
    Py_DECREF(attributes);
    return count < 0 ? FAILED : count != 0;
}

/* The number of bytes if the elements lie one after another in row-major order and no stride says otherwise; else -1. */
static int64_t contiguous_bytes(const Described *tensor, unsigned item_bytes)
{
    int64_t step = 1;
    int is_empty = 0;
    for (int i = tensor->dimensions - 1; i >= 0; i--) {
        if (tensor->strides == NULL || tensor->strides[i] != step)
            return -1;
        is_empty |= tensor->shape[i] == 0;
        if (tensor->shape[i] > 1 && __builtin_mul_overflow(step, tensor->shape[i], &step))
            return -1;
    }
    if (__builtin_mul_overflow(step, (int64_t)item_bytes, &step)) /* an empty one, too: the reader refuses its shape */
        return -1;
    return is_empty ? 0 : step;
}

/* Takes over the reference to `view`, which may be NULL. */
static Outcome add_buffer(Writer *writer, PyObject *view)
{
    Outcome outcome = WRITTEN;
    if (view == NULL || (writer->buffers == NULL && (writer->buffers = PyList_New(0)) == NULL) ||
        PyList_Append(writer->buffers, view) < 0)
        outcome = FAILED;
    Py_XDECREF(view);
    return outcome;
}

static Outcome write_tensor(Writer *writer, PyObject *tensor)
{
    Described described;
    Outcome outcome;
    Seen *entry = look_up(writer, tensor);
    if (entry == NULL)
        return FAILED;
    if (entry->object != NULL) {
        if (!entry->number)
            return NOT_FLAT; /* a container, which another thread has dropped since, lay here */
        uint32_t earlier = entry->number - 1;
        return put(writer, 'r', &earlier, sizeof earlier);
    }
    /* Held: at the address of one that another thread drops meanwhile, the next one could lie. */
    *entry = (Seen){Py_NewRef(tensor), ++writer->tensor_count};
    writer->seen_count++;
    if (is_attribute(tensor, name_layout, strided) != 1 || is_result(tensor, name_is_neg, Py_False) != 1 ||
        has_attributes(tensor) != 0 || exchange->describe(tensor, &described) != 0)
        return NOT_FLAT;
    PyObject *dtype = PyObject_GetAttr(tensor, name_dtype);
    Py_XDECREF(dtype); /* torch keeps it */
    int code = 0;
    while (code < DTYPE_COUNT && dtypes[code].object != dtype)
        code++;
    if (code == DTYPE_COUNT || described.dtype.bits != dtypes[code].bits || described.dtype.lanes != 1 ||
        described.dimensions > MOST_DIMENSIONS)
        return NOT_FLAT;
    int is_on_device = described.device.kind != CPU;
    if (is_on_device && writer->on_devices == NULL)
        return NOT_FLAT;
    if (dtypes[code].code == COMPLEX && is_result(tensor, name_is_conj, Py_False) != 1)
        return NOT_FLAT;
    int64_t size = contiguous_bytes(&described, dtypes[code].bits / 8);
    if (size < 0 || (size && described.data == NULL))
        return NOT_FLAT;
    int requires_grad = is_attribute(tensor, name_requires_grad, Py_True);
    if (requires_grad < 0)
        return NOT_FLAT;
    int is_out_of_band = !is_on_device && (size_t)size >= writer->out_of_band_bytes;
    size_t shape_bytes = sizeof(int64_t) * (size_t)described.dimensions;
    char *place = claim(writer, 4 + shape_bytes);
    if (place == NULL)
        return FAILED;
    place[0] = is_on_device ? 'd' : is_out_of_band ? 'o' : 't';
    place[1] = (char)code;
    place[2] = requires_grad ? REQUIRES_GRAD : 0;
    place[3] = (char)described.dimensions;
    if (shape_bytes)
        memcpy(place + 4, described.shape, shape_bytes);
    char *data = (char *)described.data + described.offset_bytes;
    if (writer->tensors != NULL && PyList_Append(writer->tensors, tensor) < 0)
        return FAILED;
    if (is_on_device && PyList_Append(writer->on_devices, tensor) < 0)
        return FAILED;
    if (size == 0)
        return WRITTEN; /* an empty tensor has no memory that it could share */
    PyObject *storage = PyObject_CallMethodObjArgs(tensor, name_untyped_storage, NULL);
    if (storage == NULL)
        return NOT_FLAT;
    /* A storage has one Python object, which lives on in `parts` or `buffers`: so it stands for the storage. */
    outcome = meet(writer, storage);
    if (outcome == WRITTEN) {
        /* Somebody may have shrunk the storage: then it ends before the tensor does. */
        int64_t begin = number_from(storage, name_data_ptr), held_bytes = number_from(storage, name_nbytes);
        int64_t low = (int64_t)(uintptr_t)data - begin;
        if (begin <= 0 || low < 0 || low > held_bytes || held_bytes - low < size)
            outcome = NOT_FLAT;
    }
    if (outcome != WRITTEN) {
        Py_DECREF(storage);
        return outcome;
    }
    if (is_on_device)
        return add_part(writer, storage, "", 0); /* only to hold it, as `meet` demands */
    if (!is_out_of_band)
        return add_part(writer, storage, data, (size_t)size);
    PyObject *view = memory_view(storage, data, (Py_ssize_t)size);
    Py_DECREF(storage);
    return add_buffer(writer, view);
}

static Outcome write_bytes(Writer *writer, PyObject *bytes)
{
    Py_ssize_t size = PyBytes_Size(bytes);
    if ((size_t)size < writer->out_of_band_bytes)
        return size > MOST_TEXT_BYTES ? NOT_FLAT : put_counted(writer, 'b', size, PyBytes_AsString(bytes), (size_t)size);
    Outcome outcome = meet(writer, bytes);
    if (outcome == WRITTEN)
        outcome = put(writer, 'B', "", 0);
    return outcome == WRITTEN ? add_buffer(writer, PyMemoryView_FromObject(bytes)) : outcome;
}

static Outcome write_value(Writer *writer, PyObject *value, int depth);

static Outcome write_item(Writer *writer, PyObject *item, int depth)
{
    /* A list may be changed by another thread while torch is asked about a tensor in it. */
    Py_INCREF(item);
    Outcome outcome = write_value(writer, item, depth);
    Py_DECREF(item);
    return outcome;
}

static Outcome write_tuple(Writer *writer, PyObject *tuple, int depth)
{
    Py_ssize_t count = PyTuple_Size(tuple);
    Outcome outcome = put_counted(writer, '(', count, "", 0);
    for (Py_ssize_t i = 0; i < count && outcome == WRITTEN; i++)
        outcome = write_value(writer, PyTuple_GetItem(tuple, i), depth);
    return outcome;
}

static Outcome write_list(Writer *writer, PyObject *list, int depth)
{
    Py_ssize_t count = PyList_Size(list);
    Outcome outcome = meet(writer, list);
    if (outcome == WRITTEN)
        outcome = put_counted(writer, '[', count, "", 0);
    for (Py_ssize_t i = 0; i < count && outcome == WRITTEN; i++) {
        PyObject *item = PyList_GetItem(list, i);
        outcome = item == NULL ? NOT_FLAT : write_item(writer, item, depth);
    }
    return PyList_Size(list) == count ? outcome : outcome == FAILED ? FAILED : NOT_FLAT;
}

static Outcome write_dict(Writer *writer, PyObject *dict, int depth)
{
    PyObject *key, *value;
    Py_ssize_t position = 0, count = PyDict_Size(dict), found = 0;
    Outcome outcome = meet(writer, dict);
    if (outcome == WRITTEN)
        outcome = put_counted(writer, '{', count, "", 0);
    while (outcome == WRITTEN && PyDict_Next(dict, &position, &key, &value)) {
        if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key))
            return NOT_FLAT;
        Py_INCREF(value);
        outcome = write_value(writer, key, depth);
        if (outcome == WRITTEN)
            outcome = write_value(writer, value, depth);
        Py_DECREF(value);
        found++;
    }
    return outcome == WRITTEN && (found != count || PyDict_Size(dict) != count) ? NOT_FLAT : outcome;
}

static Outcome write_value(Writer *writer, PyObject *value, int depth)
{
    if (value == Py_None)
        return put(writer, 'N', "", 0);
    if (value == Py_True || value == Py_False)
        return put(writer, value == Py_True ? 'T' : 'F', "", 0);
    if ((PyObject *)Py_TYPE(value) == tensor_type)
        return write_tensor(writer, value);
    if (PyLong_CheckExact(value)) {
        int overflow;
        int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow ? NOT_FLAT : put(writer, 'i', &number, sizeof number);
    }
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AsDouble(value);
        return put(writer, 'f', &number, sizeof number);
    }
    if (PyUnicode_CheckExact(value)) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(value, &size);
        return text == NULL || size > MOST_TEXT_BYTES ? NOT_FLAT : put_counted(writer, 's', size, text, (size_t)size);
    }
    if (PyBytes_CheckExact(value))
        return write_bytes(writer, value);
    if (writer->references != NULL && (PyObject *)Py_TYPE(value) == writer->reference_class) {
        Outcome outcome = meet(writer, value);
        if (outcome == WRITTEN)
            outcome = put(writer, 'n', "", 0);
        return outcome == WRITTEN && PyList_Append(writer->references, value) < 0 ? FAILED : outcome;
    }
    if (depth == MOST_DEPTH)
        return NOT_FLAT;
    if (PyTuple_CheckExact(value))
        return write_tuple(writer, value, depth + 1);
    if (PyList_CheckExact(value))
        return write_list(writer, value, depth + 1);
    if (PyDict_CheckExact(value))
        return write_dict(writer, value, depth + 1);
    return NOT_FLAT;
}

static PyObject *joined(Writer *writer)
{
    if (writer->used > UINT32_MAX)
        return Py_NewRef(Py_None);
    uint32_t text_bytes = (uint32_t)writer->used;
    PyObject *payload = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(writer->used + writer->data_bytes + 5));
    if (payload == NULL)
        return NULL;
    char *place = PyBytes_AsString(payload);
    memcpy(place, writer->text, writer->used);
    place += writer->used;
    for (size_t i = 0; i < writer->part_count; i++) {
        memcpy(place, writer->parts[i].data, writer->parts[i].size);
        place += writer->parts[i].size;
    }
    memcpy(place, &text_bytes, 4);
    place[4] = 'F';
    PyObject *buffers = writer->buffers == NULL ? PyTuple_New(0) : Py_NewRef(writer->buffers);
    PyObject *both = buffers == NULL ? NULL : PyTuple_Pack(2, payload, buffers);
    Py_XDECREF(buffers);
    Py_DECREF(payload);
    return both;
}

static PyObject *speedups_write(PyObject *module, PyObject *arguments)
{
    PyObject *value, *tensors, *reference_class = Py_None, *references = Py_None, *on_devices = Py_None;
    Py_ssize_t out_of_band_bytes;
    Writer writer;
    if (!PyArg_ParseTuple(arguments, "OOn|OOO", &value, &tensors, &out_of_band_bytes, &reference_class, &references, &on_devices))
        return NULL;
    if ((tensors != Py_None && !PyList_CheckExact(tensors)) || (references != Py_None && !PyList_CheckExact(references)) ||
        (on_devices != Py_None && !PyList_CheckExact(on_devices))) {
        PyErr_SetString(PyExc_TypeError, "tensors and references are collected in lists");
        return NULL;
    }
    writer.text = writer.first_text;
    writer.used = 0;
    writer.room = sizeof writer.first_text;
    writer.parts = writer.first_parts;
    writer.part_count = writer.data_bytes = 0;
    writer.part_room = sizeof writer.first_parts / sizeof writer.first_parts[0];
    writer.seen = writer.first_seen;
    writer.seen_count = writer.tensor_count = 0;
    writer.seen_room = sizeof writer.first_seen / sizeof writer.first_seen[0];
    memset(writer.first_seen, 0, sizeof writer.first_seen);
    writer.tensors = tensors == Py_None ? NULL : tensors;
    writer.references = references == Py_None ? NULL : references;
    writer.reference_class = reference_class;
    writer.on_devices = on_devices == Py_None ? NULL : on_devices;
    writer.buffers = NULL;
    writer.out_of_band_bytes = (size_t)out_of_band_bytes;

    Outcome outcome = write_value(&writer, value, 0);
    PyObject *result = NULL;
    if (outcome == WRITTEN)
        result = joined(&writer);
    else if (outcome == NOT_FLAT) {
        PyErr_Clear(); /* of torch, which cannot describe a tensor so; pickle's way will tell what is wrong, if anything */
        result = Py_NewRef(Py_None);
    }
    for (size_t i = 0; i < writer.part_count; i++)
        Py_DECREF(writer.parts[i].storage);
    for (size_t i = 0; i < writer.seen_room; i++)
        if (writer.seen[i].number)
            Py_DECREF(writer.seen[i].object);
    Py_XDECREF(writer.buffers);
    if (writer.text != writer.first_text)
        free(writer.text);
    if (writer.parts != writer.first_parts)
        free(writer.parts);
    if (writer.seen != writer.first_seen)
        free(writer.seen);
    return result;
}

/* ------------------------------------------------------------------ reading */

typedef struct {
    const char *text, *text_end, *data, *data_end;
    PyObject *buffers, *references, *on_device;
    Py_ssize_t next_buffer, next_reference;
    PyObject *tensors;
    PyObject **made; /* the tensors so far, held: a dict may drop one whose key comes again */
    uint32_t made_count, made_room;
    PyObject *first_made[8];
    size_t promised; /* items of the containers that are being read, which have yet to come */
} Reader;

/* A tensor's memory and description, in one allocation; or a description, and the buffer that it shows. */
typedef struct {
    Managed managed; /* first: torch gives us its address back */
    PyObject *owner;
    Py_buffer view;
    int64_t numbers[]; /* shape, strides, then the elements, unless a buffer has them */
} Rebuilt;

static void delete_copied(Managed *managed)
{
    free(managed);
}

static void delete_over_buffer(Managed *managed)
{
    Rebuilt *rebuilt = (Rebuilt *)managed;
    if (Py_IsInitialized()) { /* torch may let go of a tensor after the interpreter has ended */
        PyGILState_STATE state = PyGILState_Ensure();
        PyBuffer_Release(&rebuilt->view);
        Py_DECREF(rebuilt->owner);
        PyGILState_Release(state);
    }
    free(rebuilt);
}

static PyObject *malformed(const char *what)
{
    PyErr_Format(PyExc_ValueError, "the message is malformed: %s", what);
    return NULL;
}

static Rebuilt *new_rebuilt(int dimensions, size_t data_bytes)
{
    size_t size = sizeof(Rebuilt) + 2 * sizeof(int64_t) * (size_t)dimensions;
    Rebuilt *rebuilt = malloc(size + (data_bytes ? data_bytes + ALIGNMENT_BYTES : 0));
    if (rebuilt == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    rebuilt->managed = (Managed){
        .version = {DLPACK_MAJOR, DLPACK_MINOR},
        .delete = delete_copied,
        .tensor = {.device = {CPU, 0}, .dimensions = dimensions, .shape = rebuilt->numbers,
                   .strides = rebuilt->numbers + dimensions},
    };
    if (data_bytes)
        rebuilt->managed.tensor.data =
            (void *)(((uintptr_t)rebuilt + size + ALIGNMENT_BYTES - 1) & ~(uintptr_t)(ALIGNMENT_BYTES - 1));
    return rebuilt;
}

static PyObject *next_buffer(Reader *reader)
{
    PyObject *buffer = reader->buffers == Py_None ? NULL : PySequence_GetItem(reader->buffers, reader->next_buffer);
    if (buffer == NULL) {
        PyErr_Clear();
        return malformed("a buffer is missing");
    }
    reader->next_buffer++;
    return buffer;
}

/* A tensor description over the next buffer of the message, or a copy where torch must not write or expects alignment. */
static Rebuilt *over_buffer(Reader *reader, int dimensions, size_t size)
{
    PyObject *owner = next_buffer(reader);
    if (owner == NULL)
        return NULL;
    Py_buffer view;
    Rebuilt *rebuilt = NULL;
    if (PyObject_GetBuffer(owner, &view, PyBUF_SIMPLE) < 0)
        goto done;
    if ((size_t)view.len != size)
        malformed("a tensor's shape does not fit its buffer");
    else if (view.readonly || (uintptr_t)view.buf % 16) {
        rebuilt = new_rebuilt(dimensions, size);
        if (rebuilt != NULL)
            memcpy(rebuilt->managed.tensor.data, view.buf, size);
    }
    else if ((rebuilt = new_rebuilt(dimensions, 0)) != NULL) {
        rebuilt->managed.tensor.data = view.buf;
        rebuilt->managed.delete = delete_over_buffer;
        rebuilt->owner = owner;
        rebuilt->view = view;
        return rebuilt;
    }
    PyBuffer_Release(&view);
done:
    Py_DECREF(owner);
    return rebuilt;
}

static int keep_made(Reader *reader, PyObject *tensor)
{
    if (reader->made_count == reader->made_room) {
        PyObject **larger = malloc(2 * sizeof *larger * (size_t)reader->made_room);
        if (larger == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(larger, reader->made, sizeof *larger * (size_t)reader->made_count);
        if (reader->made != reader->first_made)
            free(reader->made);
        reader->made = larger;
        reader->made_room *= 2;
    }
    reader->made[reader->made_count++] = Py_NewRef(tensor);
    return 0;
}

/* A tensor whose memory the table of devices tells of: Python code makes it. */
static PyObject *made_on_device(Reader *reader, unsigned code, const char *lengths, int dimensions)
{
    if (reader->on_device == NULL)
        return malformed("it has a tensor on a device, and no table of devices");
    PyObject *shape = PyTuple_New(dimensions);
    for (int i = 0; shape != NULL && i < dimensions; i++) {
        int64_t length;
        memcpy(&length, lengths + 8 * i, 8);
        PyObject *number = PyLong_FromLongLong(length);
        if (number == NULL || PyTuple_SetItem(shape, i, number) < 0)
            Py_CLEAR(shape);
    }
    PyObject *made = shape == NULL ? NULL : PyObject_CallFunction(reader->on_device, "IO", code, shape);
    Py_XDECREF(shape);
    return made;
}

static PyObject *read_tensor(Reader *reader, char tag)
{
    int is_out_of_band = tag == 'o';
    if (reader->text_end - reader->text < 3)
        return malformed("a tensor's description is cut off");
    unsigned code = (unsigned char)reader->text[0], flags = (unsigned char)reader->text[1];
    int dimensions = (unsigned char)reader->text[2];
    const char *shape = reader->text + 3;
    if (code >= DTYPE_COUNT || flags > REQUIRES_GRAD || dimensions > MOST_DIMENSIONS)
        return malformed("a tensor's description makes no sense");
    if (reader->text_end - shape < 8 * dimensions)
        return malformed("a tensor's shape is cut off");
    reader->text = shape + 8 * dimensions;
    int64_t size = dtypes[code].bits / 8;
    int is_empty = 0;
    for (int i = 0; i < dimensions; i++) {
        int64_t length;
        memcpy(&length, shape + 8 * i, 8);
        if (length < 0 || (length > 1 && __builtin_mul_overflow(size, length, &size)))
            return malformed("a tensor's shape makes no sense");
        is_empty |= length == 0;
    }
    if (is_empty)
        size = 0;
    PyObject *object;
    if (tag == 'd') {
        object = made_on_device(reader, code, shape, dimensions);
        if (object == NULL)
            return NULL;
    }
    else {
        if (is_out_of_band ? size == 0 : size > reader->data_end - reader->data)
            return malformed("a tensor has fewer bytes than its shape says");
        Rebuilt *rebuilt =
            is_out_of_band ? over_buffer(reader, dimensions, (size_t)size) : new_rebuilt(dimensions, (size_t)size);
        if (rebuilt == NULL)
            return NULL;
        Described *tensor = &rebuilt->managed.tensor;
        tensor->dtype = (DataType){dtypes[code].code, dtypes[code].bits, 1};
        int64_t step = 1;
        for (int i = dimensions - 1; i >= 0; i--) {
            memcpy(tensor->shape + i, shape + 8 * i, 8);
            tensor->strides[i] = step;
            step *= tensor->shape[i] > 1 ? tensor->shape[i] : 1;
        }
        if (!is_out_of_band && size) {
            memcpy(tensor->data, reader->data, (size_t)size);
            reader->data += size;
        }
        void *made = NULL;
        if (exchange->object_from_managed(&rebuilt->managed, &made) != 0) /* in any case it is torch's now */
            return NULL;
        object = made;
    }
    if (keep_made(reader, object) < 0 ||
        (flags & REQUIRES_GRAD && PyObject_SetAttr(object, name_requires_grad, Py_True) < 0) ||
        (reader->tensors != NULL && PyList_Append(reader->tensors, object) < 0)) {
        Py_DECREF(object);
        return NULL;
    }
    return object;
}

static PyObject *read_value(Reader *reader, int depth);

static int take_number(Reader *reader, void *number, Py_ssize_t size)
{
    if (reader->text_end - reader->text < size) {
        malformed("a number is cut off");
        return 0;
    }
    memcpy(number, reader->text, (size_t)size);
    reader->text += size;
    return 1;
}

static PyObject *read_container(Reader *reader, char tag, int depth)
{
    uint32_t count;
    if (!take_number(reader, &count, sizeof count))
        return NULL;
    /* Every item takes a byte at least, and so do those of the containers around: so much may be allocated, and no more. */
    if (depth > MOST_DEPTH || reader->promised + count > (size_t)(reader->text_end - reader->text))
        return malformed("a container's length makes no sense");
    reader->promised += count;
    PyObject *made = tag == '(' ? PyTuple_New(count) : tag == '[' ? PyList_New(count) : PyDict_New();
    for (Py_ssize_t i = 0; made != NULL && i < (Py_ssize_t)count; i++) {
        PyObject *key = NULL, *item;
        int failed;
        reader->promised--;
        if (tag == '{') {
            if (reader->text < reader->text_end && *reader->text != 's' && *reader->text != 'i')
                malformed("a key is neither a text nor a number");
            else
                key = read_value(reader, depth);
            if (key == NULL) {
                Py_CLEAR(made);
                break;
            }
        }
        item = read_value(reader, depth);
        if (item == NULL)
            failed = 1;
        else if (tag == '(')
            failed = PyTuple_SetItem(made, i, item) < 0;
        else if (tag == '[')
            failed = PyList_SetItem(made, i, item) < 0;
        else {
            failed = PyDict_SetItem(made, key, item) < 0;
            Py_DECREF(item);
        }
        Py_XDECREF(key);
        if (failed)
            Py_CLEAR(made);
    }
    return made;
}

static PyObject *read_text(Reader *reader, char tag)
{
    uint32_t size;
    if (!take_number(reader, &size, sizeof size))
        return NULL;
    if (size > (size_t)(reader->text_end - reader->text))
        return malformed("a text is cut off");
    const char *text = reader->text;
    reader->text += size;
    return tag == 's' ? PyUnicode_DecodeUTF8(text, size, NULL) : PyBytes_FromStringAndSize(text, size);
}

static PyObject *read_bytes(Reader *reader)
{
    PyObject *buffer = next_buffer(reader);
    if (buffer == NULL)
        return NULL;
    PyObject *bytes = PyBytes_FromObject(buffer);
    Py_DECREF(buffer);
    return bytes;
}

static PyObject *read_reference(Reader *reader)
{
    PyObject *found = reader->references == NULL ? NULL : PySequence_GetItem(reader->references, reader->next_reference);
    if (found == NULL) {
        PyErr_Clear();
        return malformed("a reference is missing in its notes");
    }
    reader->next_reference++;
    return found;
}

static PyObject *read_value(Reader *reader, int depth)
{
    if (reader->text == reader->text_end)
        return malformed("it ends too early");
    char tag = *reader->text++;
    uint32_t number;
    int64_t integer;
    double real;
    switch (tag) {
    case 'N':
        return Py_NewRef(Py_None);
    case 'T':
        return Py_NewRef(Py_True);
    case 'F':
        return Py_NewRef(Py_False);
    case 'i':
        return take_number(reader, &integer, sizeof integer) ? PyLong_FromLongLong(integer) : NULL;
    case 'f':
        return take_number(reader, &real, sizeof real) ? PyFloat_FromDouble(real) : NULL;
    case 's':
    case 'b':
        return read_text(reader, tag);
    case 'B':
        return read_bytes(reader);
    case 'n':
        return read_reference(reader);
    case 't':
    case 'o':
    case 'd':
        return read_tensor(reader, tag);
    case 'r':
        if (!take_number(reader, &number, sizeof number))
            return NULL;
        return number < reader->made_count ? Py_NewRef(reader->made[number]) : malformed("it repeats what it has not told");
    case '(':
    case '[':
    case '{':
        return read_container(reader, tag, depth + 1);
    default:
        return malformed("it has a value of unknown kind");
    }
}

static PyObject *speedups_read(PyObject *module, PyObject *arguments)
{
    Py_buffer payload;
    PyObject *buffers, *tensors, *references = NULL, *on_device = Py_None;
    if (!PyArg_ParseTuple(arguments, "y*OO|OO", &payload, &buffers, &tensors, &references, &on_device))
        return NULL;
    PyObject *value = NULL;
    uint32_t text_bytes;
    const char *begin = payload.buf, *end = begin + payload.len - 5;
    if (payload.len < 5 || (memcpy(&text_bytes, end, 4), text_bytes > (size_t)(end - begin)))
        malformed("its parts are longer than the whole");
    else if (tensors != Py_None && !PyList_CheckExact(tensors))
        PyErr_SetString(PyExc_TypeError, "tensors are collected in a list");
    else {
        Reader reader = {
            .text = begin,
            .text_end = begin + text_bytes,
            .data = begin + text_bytes,
            .data_end = end,
            .buffers = buffers,
            .references = references,
            .on_device = on_device == Py_None ? NULL : on_device,
            .tensors = tensors == Py_None ? NULL : tensors,
            .made = reader.first_made,
            .made_room = sizeof reader.first_made / sizeof reader.first_made[0],
        };
        value = read_value(&reader, 0);
        if (value != NULL && (reader.text != reader.text_end || reader.data != reader.data_end)) {
            Py_CLEAR(value);
            malformed("there is more of it than it tells of");
        }
        for (uint32_t i = 0; i < reader.made_count; i++)
            Py_DECREF(reader.made[i]);
        if (reader.made != reader.first_made)
            free(reader.made);
    }
    PyBuffer_Release(&payload);
    return value;
}

/* ------------------------------------------------------------------ weights/checksums.py, which has the formula */

enum { PAGE_WORDS = 512, PAGE_BYTES = 4096 };

static uint64_t copy_and_sum(unsigned char *target, const unsigned char *source, size_t size)
{
    uint64_t total = size, weight = 5, word;
    size_t at = 0;
    for (; size - at >= PAGE_BYTES; at += PAGE_BYTES, weight += 2) {
        uint64_t words[8], sums[4] = {0};
        if (target != NULL)
            memcpy(target + at, source + at, PAGE_BYTES);
        for (size_t i = 0; i < PAGE_BYTES; i += sizeof words) { /* by now the page is in the nearest cache */
            memcpy(words, source + at + i, sizeof words);
            for (int j = 0; j < 4; j++)
                sums[j] += words[j] + words[j + 4];
        }
        total += weight * (sums[0] + sums[1] + sums[2] + sums[3]);
    }
    if (target != NULL)
        memcpy(target + at, source + at, size - at);
    for (weight = 1; size - at >= sizeof word; at += sizeof word, weight += 2) {
        memcpy(&word, source + at, sizeof word);
        total += weight * word;
    }
    word = 0;
    memcpy(&word, source + at, size - at);
    return total + 3 * word;
}

static PyObject *speedups_copy_and_sum(PyObject *module, PyObject *arguments)
{
    unsigned long long target, source, size, total;
    if (!PyArg_ParseTuple(arguments, "KKK", &target, &source, &size))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    total = copy_and_sum((unsigned char *)(uintptr_t)target, (const unsigned char *)(uintptr_t)source, (size_t)size);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(total);
}

/* ------------------------------------------------------------------ the module */

static PyObject *speedups_setup(PyObject *module, PyObject *arguments)
{
    PyObject *capsule, *tensor, *layout, *objects;
    int version;
    if (!PyArg_ParseTuple(arguments, "iOOOO!", &version, &capsule, &tensor, &layout, &PyTuple_Type, &objects))
        return NULL;
    if (version != VERSION || PyTuple_Size(objects) != DTYPE_COUNT) {
        PyErr_SetString(PyExc_ImportError, "it was built for another version of farcall");
        return NULL;
    }
    const Exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (found == NULL)
        return NULL;
    while (found != NULL && found->version.major != DLPACK_MAJOR)
        found = found->previous;
    if (found == NULL || found->describe == NULL || found->object_from_managed == NULL) {
        PyErr_SetString(PyExc_ImportError, "this torch speaks another DLPack");
        return NULL;
    }
    exchange = found;
    tensor_type = Py_NewRef(tensor);
    strided = Py_NewRef(layout);
    for (int i = 0; i < DTYPE_COUNT; i++)
        dtypes[i].object = Py_NewRef(PyTuple_GetItem(objects, i));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"setup", speedups_setup, METH_VARARGS, "setup(version, capsule, Tensor, strided, dtypes): to be called once, before the others."},
    {"write", speedups_write, METH_VARARGS,
     "write(value, tensors, out_of_band_bytes, reference_class, references, on_devices): the payload and its buffers; None where "
     "pickle must do it."},
    {"read", speedups_read, METH_VARARGS, "read(payload, buffers, tensors, references, on_device): the value."},
    {"copy_and_sum", speedups_copy_and_sum, METH_VARARGS,
     "copy_and_sum(target, source, size): copy from one address to another, unless target is 0; the checksum."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_speedups", "flat.py, compiled.", -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__speedups(void)
{
    const struct {
        PyObject **place;
        const char *text;
    } names[] = {
        {&name_data_ptr, "data_ptr"},
        {&name_dict, "__dict__"},
        {&name_dtype, "dtype"},
        {&name_is_conj, "is_conj"},
        {&name_is_neg, "is_neg"},
        {&name_layout, "layout"},
        {&name_nbytes, "nbytes"},
        {&name_requires_grad, "requires_grad"},
        {&name_untyped_storage, "untyped_storage"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (*names[i].place == NULL && (*names[i].place = PyUnicode_InternFromString(names[i].text)) == NULL)
            return NULL;
    if (memory_type == NULL && (memory_type = (PyTypeObject *)PyType_FromSpec(&memory_spec)) == NULL)
        return NULL;
    return PyModule_Create(&definition);
}

/* Glue: registered memory, and what keeps the buffers of requests.
 *
 * The caller holds the interpreter's lock, and the runtime's if it has one. The mutex of the core is held for what a
 * wire uses, as long as that is read or changed; without it, regions may be read with the interpreter's lock, as they
 * change with both. Requests hold their buffer until they complete or are handed back; a region holds its buffer until
 * it is removed and no request uses it. So no pointer of the core outlives its memory.
 */
#include "module.h"

PyTypeObject *regions_type;
PyObject *unsignaled_class;

/* -- pins ------------------------------------------------------------------------------------------------------------ */

struct pin *make_pin(PyObject *owner, size_t most) {
    struct pin *pin = PyMem_Malloc(sizeof *pin + most * (sizeof *pin->holds + sizeof *pin->elements));
    if (!pin) {
        PyErr_NoMemory();
        return NULL;
    }
    *pin = (struct pin){.owner = Py_XNewRef(owner), .uses = 1};
    pin->memory.elements = pin->elements = (struct rdmacm_element *)(void *)&pin->holds[most];
    return pin;
}

/* Add an element of memory that the next hold keeps alive. */
static void add_element(struct pin *pin, uint8_t *data, uint32_t length, uint32_t lkey) {
    pin->elements[pin->memory.count++] = (struct rdmacm_element){data, length, lkey};
    pin->memory.length += length;
}

bool pin_buffer(struct pin *pin, PyObject *exporter, int flags) {
    struct hold *hold = &pin->holds[pin->memory.count];
    if (PyObject_GetBuffer(exporter, &hold->view, flags) < 0)
        return false;
    hold->region = NULL;
    if (!hold->view.len) { /* an element has bytes */
        PyBuffer_Release(&hold->view);
        return true;
    }
    /* A message is shorter than what 32 bits cannot count. */
    uint64_t length = (uint64_t)hold->view.len;
    add_element(pin, hold->view.buf, length < UINT32_MAX ? (uint32_t)length : UINT32_MAX, 0);
    return true;
}

void pin_region(struct pin *pin, struct pin *region, uint8_t *data, uint32_t length, uint32_t lkey) {
    region->uses++;
    pin->holds[pin->memory.count].region = region;
    add_element(pin, data, length, lkey);
}

void drop_pin(void *pointer) {
    rdmacm_check_outside("a pin ends");
    struct pin *pin = pointer;
    if (--pin->uses)
        return;
    /* What follows may run any code, which knows nothing of this pin. */
    for (size_t i = 0; i < pin->memory.count; i++) {
        if (pin->holds[i].region)
            drop_pin(pin->holds[i].region);
        else
            PyBuffer_Release(&pin->holds[i].view);
    }
    Py_XDECREF(pin->owner);
    Py_XDECREF(pin->wr_id);
    Py_XDECREF(pin->route);
    PyMem_Free(pin->bind);
    PyMem_Free(pin);
}

bool keep_pin(struct pin *pin, bool is_kept) {
    if (!is_kept)
        drop_pin(pin);
    return is_kept;
}

struct pin *pin_segments(PyObject *work, int flags) {
    PyObject *segments = PyObject_GetAttr(work, names.segments);
    Py_ssize_t count = segments ? PySequence_Size(segments) : -1;
    struct pin *pin = count >= 0 && count <= RDMACM_MOST_ELEMENTS ? make_pin(work, (size_t)count) : NULL;
    for (Py_ssize_t i = 0; pin && i < count; i++) {
        PyObject *segment = PySequence_GetItem(segments, i);
        bool done = segment && pin_buffer(pin, segment, flags);
        Py_XDECREF(segment);
        if (done)
            continue;
        keep_pin(pin, false);
        pin = NULL;
        if (PyErr_ExceptionMatches(PyExc_ValueError) || PyErr_ExceptionMatches(PyExc_BufferError)) {
            PyErr_Clear(); /* released, or read-only: the request fails in its turn */
            pin = make_pin(work, 0);
            if (pin)
                pin->memory.is_inaccessible = true;
            break;
        }
    }
    Py_XDECREF(segments);
    return pin;
}

/* Give the elements of a pin the keys that a RecvWork has for them. */
static bool read_keys(PyObject *work, struct pin *pin) {
    PyObject *keys = PyObject_GetAttr(work, names.lkeys);
    Py_ssize_t count = keys ? PySequence_Size(keys) : -1;
    bool done = count >= 0;
    for (Py_ssize_t i = 0; done && i < count && (size_t)i < pin->memory.count; i++) {
        PyObject *key = PySequence_GetItem(keys, i), *number = key ? PyNumber_Index(key) : NULL;
        uint64_t lkey = 0;
        done = number && number_of(number, UINT32_MAX, &lkey);
        pin->elements[i].lkey = (uint32_t)lkey;
        Py_XDECREF(number);
        Py_XDECREF(key);
    }
    Py_XDECREF(keys);
    return done;
}

struct pin *pin_recv_work(PyObject *work) {
    struct pin *pin = pin_segments(work, PyBUF_WRITABLE);
    if (pin && !keep_pin(pin, read_keys(work, pin)))
        pin = NULL;
    return pin;
}

PyObject *wr_id_of(const struct pin *pin) {
    return pin->owner ? PyObject_GetAttr(pin->owner, names.wr_id) : Py_XNewRef(pin->wr_id);
}

PyObject *view_of_region(const struct pin *region, const uint8_t *data, uint64_t length) {
    const Py_buffer *view = &region->holds[0].view;
    PyObject *whole = PyMemoryView_FromObject(view->obj);
    if (!whole)
        return NULL;
    Py_ssize_t at = (Py_ssize_t)(data - (const uint8_t *)view->buf);
    PyObject *part = PySequence_GetSlice(whole, at, at + (Py_ssize_t)length);
    Py_DECREF(whole);
    return part;
}

/* -- regions --------------------------------------------------------------------------------------------------------- */

static int regions_traverse(Regions *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    for (size_t i = 0; i < self->regions.table.capacity; i++) {
        const struct rdmacm_region *region = self->regions.table.slots[i].item;
        if (region)
            Py_VISIT(owner_of(region->pin));
    }
    return 0;
}

static int regions_clear(Regions *self) {
    enter_core(); /* windows of it, and requests to bind them, may be there longer */
    rdmacm_windows_forget(&self->regions);
    struct rdmacm_regions regions = self->regions;
    self->regions = (struct rdmacm_regions){0};
    rdmacm_leave();
    for (size_t i = 0; i < regions.table.capacity;) {
        void *pin = regions.table.slots[i].item ? rdmacm_regions_remove(&regions, regions.table.slots[i].key) : NULL;
        if (pin)
            drop_pin(pin); /* another region may be in this slot now */
        else
            i++;
    }
    rdmacm_table_free(&regions.table);
    return 0;
}

static void regions_dealloc(Regions *self) {
    PyObject_GC_UnTrack(self);
    regions_clear(self);
    free_object((PyObject *)self);
}

/* A pin of a view of its own, so that the owner may release the one that it has. */
static struct pin *pin_view(PyObject *pd, PyObject *view, int flags) {
    PyObject *own = PyMemoryView_FromObject(view);
    struct pin *pin = own ? make_pin(pd, 1) : NULL;
    if (pin && !keep_pin(pin, pin_buffer(pin, own, flags)))
        pin = NULL;
    Py_XDECREF(own);
    return pin;
}

/* Where a region of no bytes is. */
static uint8_t no_byte;

static PyObject *regions_add(Regions *self, PyObject *args) {
    unsigned int key, access;
    unsigned long long address;
    PyObject *view, *pd, *owner = Py_None;
    if (!PyArg_ParseTuple(args, "IKOIO|O", &key, &address, &view, &access, &pd, &owner))
        return NULL;
    Py_ssize_t size = PyObject_Size(view);
    if (size < 0)
        return NULL;
    bool is_written = size && access & (RDMACM_ACCESS_REMOTE_WRITE | RDMACM_ACCESS_LOCAL_WRITE);
    struct pin *pin = pin_view(pd, view, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    if (!pin && !(access & RDMACM_ACCESS_REMOTE_WRITE)) { /* read-only: the engine reports who writes there */
        PyErr_Clear();
        access &= ~(unsigned)RDMACM_ACCESS_LOCAL_WRITE;
        pin = pin_view(pd, view, PyBUF_SIMPLE);
    }
    if (!pin)
        return NULL;
    struct rdmacm_region region = {
        .address = address,
        .length = pin->memory.count ? (uint64_t)pin->holds[0].view.len : 0,
        .pd = (uint64_t)(uintptr_t)pd,
        .memory = pin->memory.count ? pin->elements[0].data : &no_byte,
        .pin = pin,
        .owner = (uint64_t)(uintptr_t)owner,
        .access = access,
    };
    bool done;
    CORE_DO(done = rdmacm_regions_add(&self->regions, key, &region));
    if (!done) {
        drop_pin(pin);
        PyErr_Format(PyExc_ValueError, "the key 0x%x is 0 or in use, or there is no memory", key);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *regions_remove(Regions *self, PyObject *args) {
    unsigned int key;
    if (!PyArg_ParseTuple(args, "I", &key))
        return NULL;
    enter_core();
    size_t bound = rdmacm_regions_bound(&self->regions, key);
    void *pin = rdmacm_regions_remove(&self->regions, key);
    rdmacm_leave();
    if (pin)
        drop_pin(pin);
    return PyLong_FromSize_t(bound);
}

static Py_ssize_t regions_length(Regions *self) { return (Py_ssize_t)self->regions.table.count; }

static PyMethodDef regions_methods[] = {
    {"add", (PyCFunction)regions_add, METH_VARARGS,
     "add(key, address, view, access, pd, owner=None): register memory; binds of windows name its owner."},
    {"remove", (PyCFunction)regions_remove, METH_VARARGS,
     "remove(key): forget the memory of a key, if there is any and no window is bound to it; how many are."},
    WINDOW_METHODS,
    {NULL, NULL, 0, NULL},
};

static PyType_Slot regions_slots[] = {
    SLOT(tp_doc, "The registered memory of a device, by key."),
    SLOT(tp_traverse, regions_traverse),
    SLOT(tp_clear, regions_clear),
    SLOT(tp_dealloc, regions_dealloc),
    SLOT(tp_methods, regions_methods),
    SLOT(sq_length, regions_length),
    {0, NULL},
};

bool memory_init(PyObject *module) {
    regions_type = ADD_TYPE(module, Regions, Py_TPFLAGS_HAVE_GC, regions_slots);
    return regions_type != NULL;
}

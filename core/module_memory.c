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
/* How to make what the engine has of a request that was posted directly. */
static PyObject *make_send_work, *make_recv_work;

/* -- pins ------------------------------------------------------------------------------------------------------------ */

struct pin *make_pin(PyObject *owner, PyObject *exporter, int flags) {
    struct pin *pin = PyMem_Malloc(sizeof *pin);
    if (!pin) {
        PyErr_NoMemory();
        return NULL;
    }
    pin->has_view = pin->unsignaled = false;
    pin->wr_id = NULL;
    pin->region = NULL;
    pin->route = NULL;
    pin->uses = 1;
    if (exporter) {
        if (PyObject_GetBuffer(exporter, &pin->view, flags) < 0) {
            PyMem_Free(pin);
            return NULL;
        }
        pin->has_view = true;
    }
    pin->owner = Py_XNewRef(owner);
    return pin;
}

void drop_pin(void *pointer) {
    rdmacm_check_outside("a pin ends");
    struct pin *pin = pointer;
    if (--pin->uses)
        return;
    struct pin held = *pin;
    PyMem_Free(pin);
    /* What follows may run any code. */
    if (held.has_view)
        PyBuffer_Release(&held.view);
    if (held.region)
        drop_pin(held.region);
    Py_XDECREF(held.owner);
    Py_XDECREF(held.wr_id);
    Py_XDECREF(held.route);
}

bool keep_pin(struct pin *pin, bool is_kept) {
    if (!is_kept)
        drop_pin(pin);
    return is_kept;
}

PyObject *wr_id_of(const struct pin *pin) {
    return pin->owner ? PyObject_GetAttr(pin->owner, names.wr_id) : Py_XNewRef(pin->wr_id);
}

struct rdmacm_recv recv_of(struct pin *pin) {
    struct rdmacm_recv recv = {.pin = pin};
    if (pin->has_view) {
        recv.data = pin->view.buf;
        recv.length = (uint64_t)pin->view.len;
    }
    return recv;
}

PyObject *segments_of(const struct pin *pin, const uint8_t *data, uint64_t length) {
    const struct pin *source = pin->region ? pin->region : pin;
    if (!length || !source->has_view)
        return PyTuple_New(0);
    PyObject *whole = PyMemoryView_FromObject(source->view.obj);
    if (!whole)
        return NULL;
    Py_ssize_t at = (Py_ssize_t)(data - (const uint8_t *)source->view.buf);
    PyObject *part = PySequence_GetSlice(whole, at, at + (Py_ssize_t)length);
    Py_DECREF(whole);
    return part ? Py_BuildValue("(N)", part) : NULL;
}

PyObject *work_of_send(const struct rdmacm_send *send) {
    const struct pin *pin = send->pin;
    if (pin->owner)
        return Py_NewRef(pin->owner);
    PyObject *segments = segments_of(pin, send->data, send->length);
    if (!segments)
        return NULL;
    return PyObject_CallFunction(make_send_work, "OiNOOKI", pin->wr_id, send->opcode, segments,
                                 pin->unsignaled ? Py_True : Py_False, send->solicited ? Py_True : Py_False,
                                 (unsigned long long)send->remote_addr, send->rkey);
}

PyObject *work_of_recv(const struct rdmacm_recv *recv) {
    const struct pin *pin = recv->pin;
    if (pin->owner)
        return Py_NewRef(pin->owner);
    PyObject *segments = segments_of(pin, recv->data, recv->length);
    return segments ? PyObject_CallFunction(make_recv_work, "ONI", pin->wr_id, segments, recv->lkey) : NULL;
}

/* -- regions --------------------------------------------------------------------------------------------------------- */

static int regions_traverse(Regions *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    for (size_t i = 0; i < self->regions.capacity; i++) {
        const struct rdmacm_region *region = self->regions.slots[i].item;
        if (region)
            Py_VISIT(owner_of(region->pin));
    }
    return 0;
}

static int regions_clear(Regions *self) {
    struct rdmacm_table regions = self->regions;
    self->regions = (struct rdmacm_table){0};
    for (size_t i = 0; i < regions.capacity;) {
        void *pin = regions.slots[i].item ? rdmacm_regions_remove(&regions, regions.slots[i].key) : NULL;
        if (pin)
            drop_pin(pin); /* another region may be in this slot now */
        else
            i++;
    }
    rdmacm_table_free(&regions);
    return 0;
}

static void regions_dealloc(Regions *self) {
    PyObject_GC_UnTrack(self);
    regions_clear(self);
    free_object((PyObject *)self);
}

/* A pin of a view of its own, so that the owner may release the one that it has. */
static struct pin *pin_region(PyObject *pd, PyObject *view, int flags) {
    PyObject *own = PyMemoryView_FromObject(view);
    struct pin *pin = own ? make_pin(pd, own, flags) : NULL;
    Py_XDECREF(own);
    return pin;
}

static PyObject *regions_add(Regions *self, PyObject *args) {
    unsigned int key, access;
    unsigned long long address;
    PyObject *view, *pd;
    if (!PyArg_ParseTuple(args, "IKOIO", &key, &address, &view, &access, &pd))
        return NULL;
    bool is_written = access & (RDMACM_ACCESS_REMOTE_WRITE | RDMACM_ACCESS_LOCAL_WRITE);
    struct pin *pin = pin_region(pd, view, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    if (!pin && !(access & RDMACM_ACCESS_REMOTE_WRITE)) { /* read-only: the engine reports who writes there */
        PyErr_Clear();
        access &= ~(unsigned)RDMACM_ACCESS_LOCAL_WRITE;
        pin = pin_region(pd, view, PyBUF_SIMPLE);
    }
    if (!pin)
        return NULL;
    struct rdmacm_region region = {
        .address = address,
        .length = (uint64_t)pin->view.len,
        .pd = (uint64_t)(uintptr_t)pd,
        .memory = pin->view.buf,
        .pin = pin,
        .access = access,
    };
    enter_core();
    bool done = rdmacm_regions_add(&self->regions, key, &region);
    rdmacm_leave();
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
    void *pin = rdmacm_regions_remove(&self->regions, key);
    rdmacm_leave();
    if (pin)
        drop_pin(pin);
    Py_RETURN_NONE;
}

static Py_ssize_t regions_length(Regions *self) { return (Py_ssize_t)self->regions.count; }

static PyMethodDef regions_methods[] = {
    {"add", (PyCFunction)regions_add, METH_VARARGS, "add(key, address, view, access, pd): register memory."},
    {"remove", (PyCFunction)regions_remove, METH_VARARGS, "remove(key): forget the memory of a key, if there is any."},
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

PyObject *configure_works(PyObject *Py_UNUSED(module), PyObject *args) {
    return set_objects(args, 3, &make_send_work, &make_recv_work, &unsignaled_class);
}

bool memory_init(PyObject *module) {
    regions_type = ADD_TYPE(module, Regions, Py_TPFLAGS_HAVE_GC, regions_slots);
    return regions_type != NULL;
}

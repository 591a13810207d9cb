/* Glue: registered memory, and what keeps the buffers of requests.
 *
 * The caller holds the interpreter's lock, and the runtime's if it has one. The mutex of the core is held for what a port
 * uses, as long as that is read or changed; without it, regions may be read with the interpreter's lock, as they change
 * with both. Requests hold their buffer until they
 * complete or are handed back; a region holds its buffer until it is removed and no request uses it. So no pointer of
 * the core outlives its memory.
 */
#include "module.h"

PyTypeObject *regions_type;
PyObject *unsignaled_class;
/* How to make what the engine has of a request that was posted directly. */
static PyObject *make_send_work, *make_recv_work;
static PyObject *s_wr_id;

/* -- holds ----------------------------------------------------------------------------------------------------------- */

struct hold *make_hold(PyObject *owner, PyObject *exporter, int flags) {
    struct hold *hold = PyMem_Malloc(sizeof *hold);
    if (!hold) {
        PyErr_NoMemory();
        return NULL;
    }
    hold->has_view = hold->unsignaled = false;
    hold->wr_id = NULL;
    hold->region = NULL;
    hold->route = NULL;
    hold->uses = 1;
    if (exporter) {
        if (PyObject_GetBuffer(exporter, &hold->view, flags) < 0) {
            PyMem_Free(hold);
            return NULL;
        }
        hold->has_view = true;
    }
    hold->owner = Py_XNewRef(owner);
    return hold;
}

void drop_hold(void *pointer) {
    rdmacm_check_outside("a hold ends");
    struct hold *hold = pointer;
    if (--hold->uses)
        return;
    struct hold held = *hold;
    PyMem_Free(hold);
    /* What follows may run any code. */
    if (held.has_view)
        PyBuffer_Release(&held.view);
    if (held.region)
        drop_hold(held.region);
    Py_XDECREF(held.owner);
    Py_XDECREF(held.wr_id);
    Py_XDECREF(held.route);
}

PyObject *wr_id_of(const struct hold *hold) {
    return hold->owner ? PyObject_GetAttr(hold->owner, s_wr_id) : Py_XNewRef(hold->wr_id);
}

PyObject *segments_of(const struct hold *hold, const uint8_t *data, uint64_t length) {
    const struct hold *source = hold->region ? hold->region : hold;
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
    const struct hold *hold = send->hold;
    if (hold->owner)
        return Py_NewRef(hold->owner);
    PyObject *segments = segments_of(hold, send->data, send->length);
    if (!segments)
        return NULL;
    return PyObject_CallFunction(make_send_work, "OiNOOKI", hold->wr_id, send->opcode, segments,
                                 hold->unsignaled ? Py_True : Py_False, send->solicited ? Py_True : Py_False,
                                 (unsigned long long)send->remote_addr, send->rkey);
}

PyObject *work_of_recv(const struct rdmacm_recv *recv) {
    const struct hold *hold = recv->hold;
    if (hold->owner)
        return Py_NewRef(hold->owner);
    PyObject *segments = segments_of(hold, recv->data, recv->length);
    return segments ? PyObject_CallFunction(make_recv_work, "ONI", hold->wr_id, segments, recv->lkey) : NULL;
}

/* The buffer is not visited: the collector would clear a memoryview that is in use, which CPython does not survive. A
 * buffer that is in use is kept instead, and so is what it refers to. */
int visit_hold(const void *pointer, visitproc visit, void *arg) {
    const struct hold *hold = pointer;
    Py_VISIT(hold->owner);
    return 0;
}

/* -- regions --------------------------------------------------------------------------------------------------------- */

static int regions_traverse(Regions *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    for (size_t i = 0; i < self->regions.capacity; i++) {
        if (self->regions.slots[i].key) {
            int result = visit_hold(self->regions.slots[i].hold, visit, arg);
            if (result)
                return result;
        }
    }
    return 0;
}

static int regions_clear(Regions *self) {
    struct rdmacm_regions regions = self->regions;
    self->regions = (struct rdmacm_regions){0};
    for (size_t i = 0; i < regions.capacity; i++)
        if (regions.slots[i].key)
            drop_hold(regions.slots[i].hold);
    rdmacm_regions_free(&regions);
    return 0;
}

static void regions_dealloc(Regions *self) {
    PyObject_GC_UnTrack(self);
    regions_clear(self);
    free_object((PyObject *)self);
}

/* A hold of a view of its own, so that the owner may release the one that it has. */
static struct hold *hold_region(PyObject *pd, PyObject *view, int flags) {
    PyObject *own = PyMemoryView_FromObject(view);
    struct hold *hold = own ? make_hold(pd, own, flags) : NULL;
    Py_XDECREF(own);
    return hold;
}

static PyObject *regions_add(Regions *self, PyObject *args) {
    unsigned int key, access;
    unsigned long long address;
    PyObject *view, *pd;
    if (!PyArg_ParseTuple(args, "IKOIO", &key, &address, &view, &access, &pd))
        return NULL;
    bool is_written = access & (RDMACM_ACCESS_REMOTE_WRITE | RDMACM_ACCESS_LOCAL_WRITE);
    struct hold *hold = hold_region(pd, view, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    if (!hold && !(access & RDMACM_ACCESS_REMOTE_WRITE)) { /* read-only: the engine reports who writes there */
        PyErr_Clear();
        access &= ~(unsigned)RDMACM_ACCESS_LOCAL_WRITE;
        hold = hold_region(pd, view, PyBUF_SIMPLE);
    }
    if (!hold)
        return NULL;
    struct rdmacm_region region = {
        .address = address,
        .length = (uint64_t)hold->view.len,
        .pd = (uint64_t)(uintptr_t)pd,
        .memory = hold->view.buf,
        .hold = hold,
        .key = key,
        .access = access,
    };
    enter_core();
    bool done = rdmacm_regions_add(&self->regions, &region);
    rdmacm_leave();
    if (!done) {
        drop_hold(hold);
        PyErr_Format(PyExc_ValueError, "the key 0x%x is 0 or in use, or there is no memory", key);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *regions_remove(Regions *self, PyObject *args) {
    unsigned int key;
    if (!PyArg_ParseTuple(args, "I", &key))
        return NULL;
    struct rdmacm_region removed;
    enter_core();
    bool done = rdmacm_regions_remove(&self->regions, key, &removed);
    rdmacm_leave();
    if (done)
        drop_hold(removed.hold);
    Py_RETURN_NONE;
}

static Py_ssize_t regions_length(Regions *self) { return (Py_ssize_t)self->regions.count; }

static PyMethodDef regions_methods[] = {
    {"add", (PyCFunction)regions_add, METH_VARARGS, "add(key, address, view, access, pd): register memory."},
    {"remove", (PyCFunction)regions_remove, METH_VARARGS, "remove(key): forget the memory of a key, if there is any."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot regions_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t) "The registered memory of a device, by key."},
    {Py_tp_traverse, (void *)(uintptr_t)regions_traverse},
    {Py_tp_clear, (void *)(uintptr_t)regions_clear},
    {Py_tp_dealloc, (void *)(uintptr_t)regions_dealloc},
    {Py_tp_methods, regions_methods},
    {Py_sq_length, (void *)(uintptr_t)regions_length},
    {0, NULL},
};

static PyType_Spec regions_spec = {
    .name = "rdmacm.proto._core.Regions",
    .basicsize = sizeof(Regions),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = regions_slots,
};

PyObject *configure_works(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *send, *recv, *unsignaled;
    if (!PyArg_ParseTuple(args, "OOO", &send, &recv, &unsignaled))
        return NULL;
    set_object(&make_send_work, send);
    set_object(&make_recv_work, recv);
    set_object(&unsignaled_class, unsignaled);
    Py_RETURN_NONE;
}

bool memory_init(PyObject *module) {
    const struct name names[] = {{&s_wr_id, "wr_id"}};
    if (!intern_names(names, 1))
        return false;
    regions_type = (PyTypeObject *)PyType_FromSpec(&regions_spec);
    return regions_type && PyModule_AddObjectRef(module, "Regions", (PyObject *)regions_type) == 0;
}

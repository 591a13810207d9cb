/* Glue: memory windows. What module_memory.c says about locks and memory is true here; but windows change with the mutex
 * alone, so whoever reads them has it too. */
#include "module.h"

PyTypeObject *window_type;

/* -- a window -------------------------------------------------------------------------------------------------------- */

PyObject *regions_allocate_window(Regions *self, PyObject *args) {
    PyObject *pd;
    int is_type_2;
    unsigned int key;
    if (!PyArg_ParseTuple(args, "OpI", &pd, &is_type_2, &key))
        return NULL;
    Window *window = new_object(window_type);
    if (!window)
        return NULL;
    window->owner = Py_NewRef((PyObject *)self);
    window->pd = Py_NewRef(pd);
    window->window.pd = (uint64_t)(uintptr_t)pd;
    window->window.is_type_2 = is_type_2;
    bool done;
    CORE_DO(done = rdmacm_window_allocate(&self->regions, &window->window, key));
    if (done)
        return (PyObject *)window;
    Py_DECREF((PyObject *)window);
    return PyErr_Format(PyExc_ValueError, "a window has a key like 0x%x, or there is no memory", key);
}

#define WINDOW_OBJECTS(DO) DO(owner) DO(pd)
TRAVERSE(Window, window, WINDOW_OBJECTS)

static PyObject *window_close(Window *self, PyObject *Py_UNUSED(ignored)) {
    CORE_DO(rdmacm_window_deallocate(&self->window));
    Py_RETURN_NONE;
}

static void window_dealloc(Window *self) {
    PyObject_GC_UnTrack(self);
    CORE_DO(rdmacm_window_deallocate(&self->window));
    Py_XDECREF(self->owner);
    Py_XDECREF(self->pd);
    free_object((PyObject *)self);
}

static PyObject *get_number(Window *self, void *Py_UNUSED(closure)) {
    uint64_t number;
    CORE_DO(number = self->window.number);
    return PyLong_FromUnsignedLongLong(number);
}

static PyGetSetDef window_getset[] = {
    {"number", (getter)get_number, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef window_methods[] = {
    {"close", (PyCFunction)window_close, METH_NOARGS, "Deallocate it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot window_slots[] = {
    SLOT(tp_doc, "What a memory window is bound to."),
    SLOT(tp_traverse, window_traverse),
    SLOT(tp_dealloc, window_dealloc),
    SLOT(tp_getset, window_getset),
    SLOT(tp_methods, window_methods),
    {0, NULL},
};

/* -- what queue pairs do with them ----------------------------------------------------------------------------------- */

/* The Window of a SoftMW; NULL for None, and without an exception for that of something else. */
static bool read_window(PyObject *bind, struct rdmacm_window **window) {
    PyObject *holder = PyObject_GetAttr(bind, names.window);
    PyObject *found = holder && holder != Py_None ? PyObject_GetAttr(holder, names.binding) : NULL;
    *window = found && PyObject_TypeCheck(found, window_type) ? &((Window *)found)->window : NULL;
    Py_XDECREF(found); /* the bind has it */
    Py_XDECREF(holder);
    return !PyErr_Occurred();
}

/* Read the region of a bind, which may be None. */
static bool read_region(PyObject *object, struct rdmacm_bind *bind) {
    PyObject *region = PyObject_GetAttr(object, names.region);
    bool done = region && (region == Py_None || read_uint32(region, names.lkey, UINT32_MAX, &bind->region_key));
    bind->owner = done && region != Py_None ? (uint64_t)(uintptr_t)region : 0;
    Py_XDECREF(region); /* the bind has it */
    return done;
}

/* Read a Bind, which lives longer than the result. */
static bool read_bind(PyObject *object, struct rdmacm_bind *bind) {
    return read_window(object, &bind->window) && read_region(object, bind) &&
           read_uint32(object, names.rkey, UINT32_MAX, &bind->key) &&
           read_number(object, names.addr, UINT64_MAX, &bind->address) &&
           read_number(object, names.length, UINT64_MAX, &bind->length) &&
           read_uint32(object, names.access, UINT32_MAX, &bind->access) &&
           read_number(object, names.number, UINT64_MAX, &bind->number);
}

bool pin_bind(struct pin *pin, PyObject *work, struct rdmacm_send *send) {
    if (send->opcode != RDMACM_WR_BIND_MW)
        return true;
    send->bind = pin->bind = PyMem_Calloc(1, sizeof *pin->bind);
    PyObject *bind = pin->bind ? PyObject_GetAttr(work, names.bind) : PyErr_NoMemory();
    bool done = bind && read_bind(bind, pin->bind);
    Py_XDECREF(bind); /* the work has it */
    return done;
}

PyObject *regions_bind(Regions *self, PyObject *args) {
    PyObject *pd, *object;
    unsigned long long qp;
    struct rdmacm_bind bind = {0};
    if (!PyArg_ParseTuple(args, "OKO", &pd, &qp, &object))
        return NULL;
    bool done = read_bind(object, &bind);
    if (done) {
        CORE_DO(done = rdmacm_window_bind(&self->regions, (uint64_t)(uintptr_t)pd, qp, &bind));
    }
    return answer(done);
}

PyObject *regions_invalidate(Regions *self, PyObject *args) {
    PyObject *pd;
    unsigned long long qp;
    unsigned int key;
    if (!PyArg_ParseTuple(args, "OKI", &pd, &qp, &key))
        return NULL;
    bool done;
    CORE_DO(done = rdmacm_window_invalidate(&self->regions, (uint64_t)(uintptr_t)pd, qp, key));
    return PyBool_FromLong(done);
}

PyObject *regions_free_windows(Regions *self, PyObject *args) {
    unsigned long long qp;
    if (!PyArg_ParseTuple(args, "K", &qp))
        return NULL;
    CORE_DO(rdmacm_windows_free(&self->regions, qp));
    Py_RETURN_NONE;
}

PyObject *regions_find_window(Regions *self, PyObject *args) {
    PyObject *pd, *at, *size;
    unsigned long long qp;
    unsigned int key, access;
    uint64_t address, length;
    if (!PyArg_ParseTuple(args, "OKIOOI", &pd, &qp, &key, &at, &size, &access))
        return NULL;
    if (!number_of(at, UINT64_MAX, &address) || !number_of(size, PY_SSIZE_T_MAX, &length)) {
        PyErr_Clear(); /* no number of 64 bits */
        Py_RETURN_NONE;
    }
    void *found = NULL;
    enter_core();
    uint8_t *data = rdmacm_window_find(&self->regions, (uint64_t)(uintptr_t)pd, qp, key, address, length, access, &found);
    struct pin *pin = found;
    if (pin)
        pin->uses++;
    rdmacm_leave();
    if (!pin)
        Py_RETURN_NONE;
    PyObject *view = view_of_region(pin, data, length);
    drop_pin(pin);
    return view;
}

PyObject *regions_bound(Regions *self, PyObject *args) {
    unsigned int key;
    if (!PyArg_ParseTuple(args, "I", &key))
        return NULL;
    size_t count;
    CORE_DO(count = rdmacm_regions_bound(&self->regions, key));
    return PyLong_FromSize_t(count);
}

bool windows_init(PyObject *module) {
    window_type = ADD_TYPE(module, Window, Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, window_slots);
    return window_type != NULL;
}

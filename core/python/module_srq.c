/* Glue: the receives of a shared receive queue.
 *
 * The mutex of the core guards them: the thread of a wire, without the interpreter, takes receives too.
 */
#include "module.h"

PyTypeObject *shared_type;

static PyObject *shared_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    Py_ssize_t max_wr, max_sge;
    PyObject *regions, *pd, *wire;
    if (!PyArg_ParseTuple(args, "nnO!OO", &max_wr, &max_sge, regions_type, &regions, &pd, &wire))
        return NULL;
    if (max_wr < 0 || max_sge < 0 || (wire != Py_None && !PyObject_TypeCheck(wire, wire_type)))
        return PyErr_Format(PyExc_TypeError, "two sizes, and a Wire or None are wanted");
    SharedReceives *self = new_object(type);
    if (!self)
        return NULL;
    rdmacm_srq_init(&self->srq, (size_t)max_wr);
    self->rules.max_recv_sge = (size_t)max_sge;
    self->rules.regions = &((Regions *)regions)->regions;
    self->rules.pd = (uint64_t)(uintptr_t)pd;
    self->regions = Py_NewRef(regions);
    self->pd = Py_NewRef(pd);
    self->wire = wire == Py_None ? NULL : (Wire *)Py_NewRef(wire);
    return (PyObject *)self;
}

static int shared_traverse(SharedReceives *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->regions);
    Py_VISIT(self->pd);
    if (self->is_shared) /* another thread may change the queue now */
        return 0;
    for (size_t i = 0; i < self->srq.recvs_count; i++)
        Py_VISIT(owner_of(RDMACM_RING_AT(&self->srq, recvs, i)->pin));
    return 0;
}

/* Take the oldest receive out, for no message. The mutex is held. */
static void *pop_pin(struct rdmacm_srq *srq) {
    void *pin = srq->recvs_count ? RDMACM_RING_AT(srq, recvs, 0)->pin : NULL;
    if (pin)
        RDMACM_RING_DROP(srq, recvs);
    return pin;
}

static void drop_all(SharedReceives *self) {
    for (;;) {
        void *pin;
        CORE_DO(pin = pop_pin(&self->srq));
        if (!pin)
            return;
        drop_pin(pin);
    }
}

static int shared_tp_clear(SharedReceives *self) {
    drop_all(self);
    self->rules.regions = NULL;
    Py_CLEAR(self->regions);
    Py_CLEAR(self->pd);
    return 0;
}

static void shared_dealloc(SharedReceives *self) {
    PyObject_GC_UnTrack(self);
    shared_tp_clear(self);
    rdmacm_srq_free(&self->srq); /* those that take from it refer to it, so there are none */
    Py_XDECREF((PyObject *)self->wire);
    free_object((PyObject *)self);
}

/* -- posting --------------------------------------------------------------------------------------------------------- */

/* Queue a receive that has a pin. False, with the pin dropped, if there is no room. */
static bool queue_pin(SharedReceives *self, struct pin *pin) {
    struct rdmacm_recv recv = {.pin = pin, .memory = pin->memory};
    bool done;
    CORE_DO(done = rdmacm_srq_post(&self->srq, &recv));
    return keep_pin(pin, done);
}

/* Queue a RecvWR. */
static bool post(void *shared, PyObject *object) {
    SharedReceives *self = shared;
    struct request request;
    struct pin *pin = NULL;
    if (parse_recv(object, &request))
        pin = pin_receive(&self->rules, request.wr_id, request.locals, request.count);
    bool done = pin && queue_pin(self, pin);
    end_request(&request);
    return done;
}

static PyObject *shared_post(SharedReceives *self, PyObject *requests) {
    if (!self->wire || !self->wire->wire)
        return Py_NewRef(requests);
    Lock *lock = self->wire->lock;
    take_lock(lock);
    Py_ssize_t done = post_all(self, requests, post);
    PyErr_Clear();
    rdmacm_lock_release(&lock->lock);
    return rest_of(requests, done);
}

static PyObject *shared_post_work(SharedReceives *self, PyObject *work) {
    struct pin *pin = pin_recv_work(work);
    if (!pin && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "a receive of more than %d elements", RDMACM_MOST_ELEMENTS);
    return pin ? PyBool_FromLong(queue_pin(self, pin)) : NULL;
}

/* -- what was taken -------------------------------------------------------------------------------------------------- */

static PyObject *shared_take_limit_reached(SharedReceives *self, PyObject *Py_UNUSED(ignored)) {
    enter_core();
    bool is_limit_reached = self->srq.is_limit_reached;
    self->srq.is_limit_reached = false;
    rdmacm_leave();
    return PyBool_FromLong(is_limit_reached);
}

static PyObject *shared_look_up_again(SharedReceives *self, PyObject *key) {
    uint64_t lkey;
    if (!number_of(key, UINT32_MAX, &lkey))
        return PyErr_Format(PyExc_ValueError, "a key is wanted");
    CORE_DO(rdmacm_srq_look_up(&self->srq, self->rules.regions, self->rules.pd, (uint32_t)lkey));
    Py_RETURN_NONE;
}

static PyObject *shared_clear(SharedReceives *self, PyObject *Py_UNUSED(ignored)) {
    drop_all(self);
    Py_RETURN_NONE;
}

/* -- fields ---------------------------------------------------------------------------------------------------------- */

static PyObject *get_size(const size_t *size) {
    size_t found;
    CORE_DO(found = *size);
    return PyLong_FromSize_t(found);
}

static int set_size(size_t *size, PyObject *value) {
    uint64_t number;
    if (!value || !number_of(value, SIZE_MAX, &number)) {
        PyErr_SetString(PyExc_ValueError, "a size is wanted");
        return -1;
    }
    CORE_DO(*size = (size_t)number);
    return 0;
}

static PyObject *get_max_wr(SharedReceives *self, void *Py_UNUSED(closure)) { return get_size(&self->srq.max_recvs); }

static int set_max_wr(SharedReceives *self, PyObject *value, void *Py_UNUSED(closure)) {
    return set_size(&self->srq.max_recvs, value);
}

static PyObject *get_limit(SharedReceives *self, void *Py_UNUSED(closure)) { return get_size(&self->srq.limit); }

static int set_limit(SharedReceives *self, PyObject *value, void *Py_UNUSED(closure)) {
    return set_size(&self->srq.limit, value);
}

static Py_ssize_t shared_length(SharedReceives *self) {
    size_t count;
    CORE_DO(count = self->srq.recvs_count);
    return (Py_ssize_t)count;
}

static PyGetSetDef shared_getset[] = {
    {"max_wr", (getter)get_max_wr, (setter)set_max_wr, NULL, NULL},
    {"limit", (getter)get_limit, (setter)set_limit, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef shared_methods[] = {
    {"post", (PyCFunction)shared_post, METH_O,
     "post(requests): queue a RecvWR or a list of them; what is left to Python, None: nothing."},
    {"post_work", (PyCFunction)shared_post_work, METH_O, "post_work(work): queue a RecvWork; False without room."},
    {"take_limit_reached", (PyCFunction)shared_take_limit_reached, METH_NOARGS,
     "Whether the limit was reached since the last call."},
    {"look_up_again", (PyCFunction)shared_look_up_again, METH_O,
     "look_up_again(lkey): the region of a key was registered anew."},
    {"clear", (PyCFunction)shared_clear, METH_NOARGS, "Drop all receives."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot shared_slots[] = {
    SLOT(tp_doc, "SharedReceives(max_wr, max_sge, regions, pd, wire): the receives of a shared receive queue."),
    SLOT(tp_new, shared_new),
    SLOT(tp_traverse, shared_traverse),
    SLOT(tp_clear, shared_tp_clear),
    SLOT(tp_dealloc, shared_dealloc),
    SLOT(tp_getset, shared_getset),
    SLOT(tp_methods, shared_methods),
    SLOT(sq_length, shared_length),
    {0, NULL},
};

bool srq_init(PyObject *module) {
    shared_type = ADD_TYPE(module, SharedReceives, Py_TPFLAGS_HAVE_GC, shared_slots);
    return shared_type != NULL;
}

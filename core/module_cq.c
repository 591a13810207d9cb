/* Glue: completions, and the queues that have them. */
#include "module.h"

PyTypeObject *queue_type;
static PyTypeObject *wc_class;
static allocfunc allocate_wc;
static PyObject *success, *send_opcodes[5], *recv_opcode, *zero, *s_qp_num;

/* -- completions ----------------------------------------------------------------------------------------------------- */

/* The fields of WC, in its order. */
enum {
    WC_WR_ID,
    WC_STATUS,
    WC_OPCODE,
    WC_BYTE_LEN,
    WC_IMM_DATA,
    WC_INVALIDATED_RKEY,
    WC_SOLICITED,
    WC_QP_NUM,
    WC_SRC_QP,
    WC_HAS_GRH,
    WC_VENDOR_ERR,
    WC_FIELDS,
};

static const char *const wc_names[WC_FIELDS] = {
    "wr_id", "status", "opcode", "byte_len", "imm_data", "invalidated_rkey", "solicited", "qp_num", "src_qp",
    "has_grh", "vendor_err",
};
/* Where the fields are in an object, in pointers from its beginning; to call the class takes five times as long. */
static size_t wc_places[WC_FIELDS];

/* Find the places: make an object with other values in all fields, and look for them. */
static bool find_places(PyTypeObject *type) {
    PyObject *size = PyObject_GetAttrString((PyObject *)type, "__basicsize__");
    size_t words = size ? PyLong_AsSize_t(size) / sizeof(void *) : 0;
    Py_XDECREF(size);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *wc = words && !PyErr_Occurred() ? allocate(type, 0) : NULL;
    size_t found = 0;
    for (size_t i = 0; wc && i < WC_FIELDS; i++) {
        PyObject *value = PyList_New(0);
        if (!value || PyObject_SetAttrString(wc, wc_names[i], value) < 0) {
            Py_XDECREF(value);
            break;
        }
        for (size_t at = sizeof(PyObject) / sizeof(void *); at < words; at++) {
            if (((PyObject **)wc)[at] == value) {
                wc_places[i] = at;
                found++;
            }
        }
        Py_DECREF(value);
    }
    Py_XDECREF(wc);
    if (found != WC_FIELDS && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "a class of completions with slots is wanted");
    return found == WC_FIELDS;
}

static void set(PyObject *wc, size_t field, PyObject *value) { ((PyObject **)wc)[wc_places[field]] = value; }

PyObject *make_wc(PyObject *wr_id, const struct rdmacm_completion *completion, uint32_t qp_num) {
    if (!wc_class) {
        PyErr_SetString(PyExc_RuntimeError, "configure_wc() was not called");
        return NULL;
    }
    PyObject *length = PyLong_FromUnsignedLong(completion->byte_len), *number = PyLong_FromUnsignedLong(qp_num);
    PyObject *source = completion->src_qp ? PyLong_FromUnsignedLong(completion->src_qp) : Py_NewRef(zero);
    PyObject *immediate = completion->has_imm ? PyLong_FromUnsignedLong(completion->imm) : Py_NewRef(Py_None);
    PyObject *wc = length && number && source && immediate ? allocate_wc(wc_class, 0) : NULL;
    if (!wc) {
        Py_XDECREF(length);
        Py_XDECREF(number);
        Py_XDECREF(source);
        Py_XDECREF(immediate);
        return NULL;
    }
    set(wc, WC_WR_ID, Py_NewRef(wr_id));
    set(wc, WC_STATUS, Py_NewRef(success));
    set(wc, WC_OPCODE, Py_NewRef(completion->is_recv ? recv_opcode : send_opcodes[completion->opcode]));
    set(wc, WC_BYTE_LEN, length);
    set(wc, WC_IMM_DATA, immediate);
    set(wc, WC_INVALIDATED_RKEY, Py_NewRef(Py_None));
    set(wc, WC_SOLICITED, Py_NewRef(completion->solicited ? Py_True : Py_False));
    set(wc, WC_QP_NUM, number);
    set(wc, WC_SRC_QP, source);
    set(wc, WC_HAS_GRH, Py_NewRef(completion->is_datagram ? Py_True : Py_False));
    set(wc, WC_VENDOR_ERR, Py_NewRef(zero));
    return wc;
}

PyObject *configure_wc(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *wc, *status, *write_, *send, *read, *recv;
    if (!PyArg_ParseTuple(args, "OOOOOO", &wc, &status, &write_, &send, &read, &recv))
        return NULL;
    if (!PyType_Check(wc)) {
        PyErr_SetString(PyExc_TypeError, "a class of completions is wanted");
        return NULL;
    }
    if (!find_places((PyTypeObject *)wc))
        return NULL;
    allocate_wc = (allocfunc)PyType_GetSlot((PyTypeObject *)wc, Py_tp_alloc);
    set_object((PyObject **)&wc_class, wc);
    set_object(&success, status);
    set_object(&send_opcodes[RDMACM_WR_WRITE], write_);
    set_object(&send_opcodes[RDMACM_WR_SEND], send);
    set_object(&send_opcodes[RDMACM_WR_READ], read);
    set_object(&recv_opcode, recv);
    Py_RETURN_NONE;
}

/* -- queues ---------------------------------------------------------------------------------------------------------- */

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *port;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "On", &port, &limit))
        return NULL;
    if (port != Py_None && !PyObject_TypeCheck(port, port_type)) {
        PyErr_SetString(PyExc_TypeError, "a Port or None is wanted");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    CompletionQueue *self = (CompletionQueue *)allocate(type, 0);
    if (self) {
        self->cq.owner = self;
        self->cq.limit = limit > 0 ? (size_t)limit : 0;
        self->port = port == Py_None ? NULL : (Port *)Py_NewRef(port);
    }
    return (PyObject *)self;
}

/* In a child of fork(2): a thread that does not exist there may have been about to change the entries, so they stay. */
static bool is_abandoned(const CompletionQueue *self) { return self->port && !self->port->port; }

static void drop_entry(struct rdmacm_entry *entry) {
    if (entry->object)
        Py_DECREF((PyObject *)entry->object);
    else
        drop_hold(entry->completion.hold);
}

static PyObject *queue_clear_entries(CompletionQueue *self, PyObject *Py_UNUSED(ignored)) {
    if (is_abandoned(self))
        Py_RETURN_NONE;
    while (self->cq.count) {
        struct rdmacm_entry entry = *rdmacm_cq_at(&self->cq, 0);
        rdmacm_cq_pop(&self->cq);
        drop_entry(&entry);
    }
    Py_RETURN_NONE;
}

static int queue_traverse(CompletionQueue *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->owner);
    return 0; /* other threads may change the entries, which have numbers only */
}

static int queue_clear(CompletionQueue *self) {
    Py_CLEAR(self->owner);
    return 0;
}

static void queue_dealloc(CompletionQueue *self) {
    PyObject_GC_UnTrack(self);
    if (self->port && self->cq.is_listed && self->port->port) {
        Lock *lock = (Lock *)Py_NewRef((PyObject *)self->port->lock);
        take_lock(lock);
        if (self->port->port)
            for (struct rdmacm_cq **place = &self->port->port->added; *place; place = &(*place)->next_added)
                if (*place == &self->cq) {
                    *place = self->cq.next_added;
                    break;
                }
        rdmacm_lock_release(&lock->lock);
        Py_DECREF((PyObject *)lock);
    }
    Py_DECREF(queue_clear_entries(self, NULL));
    queue_clear(self);
    if (!is_abandoned(self))
        rdmacm_cq_free(&self->cq);
    Py_XDECREF((PyObject *)self->port);
    free_object((PyObject *)self);
}

static Py_ssize_t queue_length(CompletionQueue *self) { return (Py_ssize_t)self->cq.count; }

static PyObject *queue_extend(CompletionQueue *self, PyObject *completions) {
    Py_ssize_t count = PyList_Check(completions) ? PyList_Size(completions) : -1;
    if (count < 0)
        return PyErr_Format(PyExc_TypeError, "a list of completions is wanted");
    for (Py_ssize_t i = 0; i < count; i++) {
        struct rdmacm_entry entry = {.object = PyList_GetItem(completions, i)};
        if (!entry.object)
            return NULL;
        if (!rdmacm_cq_push(&self->cq, &entry))
            return PyErr_NoMemory();
        Py_INCREF((PyObject *)entry.object);
    }
    Py_RETURN_NONE;
}

static PyObject *wc_of(const struct rdmacm_entry *entry) {
    if (entry->object)
        return entry->object;
    PyObject *wr_id = wr_id_of(entry->completion.hold);
    PyObject *wc = wr_id ? make_wc(wr_id, &entry->completion, entry->qp_num) : NULL;
    Py_XDECREF(wr_id);
    drop_hold(entry->completion.hold);
    return wc;
}

/* The first completions of the queue, at most `most`, as a list. */
static PyObject *take(CompletionQueue *self, size_t most) {
    size_t count = self->cq.count < most ? self->cq.count : most;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < count && self->cq.count; i++) {
        struct rdmacm_entry entry = *rdmacm_cq_at(&self->cq, 0);
        rdmacm_cq_pop(&self->cq);
        PyObject *wc = wc_of(&entry);
        if (!wc || PyList_Append(list, wc) < 0)
            Py_CLEAR(list);
        Py_XDECREF(wc);
    }
    return list;
}

static PyObject *queue_poll(CompletionQueue *self, PyObject *argument) {
    Py_ssize_t most = PyLong_AsSsize_t(argument);
    if (most == -1 && PyErr_Occurred())
        return NULL;
    Port *port = self->port;
    if (!port || !port->port || most <= 0)
        Py_RETURN_NONE;
    Lock *lock = port->lock;
    take_lock(lock);
    PyObject *result = NULL;
    int polled = POLLED;
    if (!self->cq.count)
        polled = poll_port(port, &self->cq);
    else if (self->waited)
        self->waited = false;
    else
        acknowledge(port);
    if (see_events(port)) {
        if (self->cq.count)
            result = take(self, (size_t)most);
        else if (polled == POLL_IN_PYTHON || self->cq.overrun)
            result = Py_NewRef(Py_None);
        else
            result = PyList_New(0);
    }
    rdmacm_lock_release(&lock->lock);
    return result;
}

static PyObject *queue_take(CompletionQueue *self, PyObject *argument) {
    Py_ssize_t most = PyLong_AsSsize_t(argument);
    if (most == -1 && PyErr_Occurred())
        return NULL;
    return take(self, most > 0 && !is_abandoned(self) ? (size_t)most : 0);
}

static PyObject *queue_drop(CompletionQueue *self, PyObject *argument) {
    unsigned long qp_num = PyLong_AsUnsignedLong(argument);
    if (qp_num == (unsigned long)-1 && PyErr_Occurred())
        return NULL;
    for (size_t left = is_abandoned(self) ? 0 : self->cq.count; left--;) {
        struct rdmacm_entry entry = *rdmacm_cq_at(&self->cq, 0);
        rdmacm_cq_pop(&self->cq);
        unsigned long number = entry.qp_num;
        if (entry.object) {
            PyObject *value = PyObject_GetAttr(entry.object, s_qp_num);
            number = value ? PyLong_AsUnsignedLong(value) : 0;
            Py_XDECREF(value);
            PyErr_Clear();
        }
        if (number == qp_num)
            drop_entry(&entry);
        else if (!rdmacm_cq_push(&self->cq, &entry)) /* has room */
            drop_entry(&entry);
    }
    Py_RETURN_NONE;
}

static PyMemberDef queue_members[] = {
    {"waited", T_BOOL, offsetof(CompletionQueue, waited), 0, NULL},
    {"watched", T_BOOL, offsetof(CompletionQueue, cq.watched), 0, NULL},
    {"limit", T_PYSSIZET, offsetof(CompletionQueue, cq.limit), 0, NULL},
    {"owner", T_OBJECT, offsetof(CompletionQueue, owner), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef queue_methods[] = {
    {"extend", (PyCFunction)queue_extend, METH_O, "extend(list): add completions."},
    {"poll", (PyCFunction)queue_poll, METH_O,
     "poll(count): up to so many completions, after progress if there are none; None: Python has to make it."},
    {"take", (PyCFunction)queue_take, METH_O, "take(count): up to so many completions."},
    {"clear", (PyCFunction)queue_clear_entries, METH_NOARGS, "Drop all completions."},
    {"drop", (PyCFunction)queue_drop, METH_O, "drop(qp_num): drop the completions of a queue pair."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot queue_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t) "The completions of a queue, oldest first; the runtime's lock guards them."},
    {Py_tp_new, (void *)(uintptr_t)queue_new},
    {Py_tp_traverse, (void *)(uintptr_t)queue_traverse},
    {Py_tp_clear, (void *)(uintptr_t)queue_clear},
    {Py_tp_dealloc, (void *)(uintptr_t)queue_dealloc},
    {Py_tp_members, queue_members},
    {Py_tp_methods, queue_methods},
    {Py_sq_length, (void *)(uintptr_t)queue_length},
    {0, NULL},
};

static PyType_Spec queue_spec = {
    .name = "rdmacm.proto._core.CompletionQueue",
    .basicsize = sizeof(CompletionQueue),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = queue_slots,
};

bool wc_init(PyObject *module) {
    queue_type = (PyTypeObject *)PyType_FromSpec(&queue_spec);
    zero = PyLong_FromLong(0);
    s_qp_num = PyUnicode_InternFromString("qp_num");
    return queue_type && zero && s_qp_num &&
           PyModule_AddObjectRef(module, "CompletionQueue", (PyObject *)queue_type) == 0;
}

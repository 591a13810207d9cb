/* Glue: completions, and the queues that have them. */
#include "module.h"

#include <string.h>

PyTypeObject *queue_type;
static PyTypeObject *wc_class;
static allocfunc allocate_wc;
PyObject *wc_statuses;
/* The members of WCOpcode by enum ibv_wr_opcode, and those of receives. */
static PyObject *send_opcodes, *recv_opcode, *recv_with_imm_opcode, *zero;

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
/* To call the class takes five times as long as to set the slots. */
static PyObject *wc_slots[WC_FIELDS];

/* Set a field to a reference that is taken over. Whether there is one. */
static bool set(PyObject *wc, size_t field, PyObject *value) {
    bool is_set = value && set_slot(wc_slots[field], wc, value) == 0;
    Py_XDECREF(value);
    return is_set;
}

struct rdmacm_completion *move_completions(struct rdmacm_completions *completions, size_t *moved) {
    size_t size = completions->count * sizeof *completions->items;
    struct rdmacm_completion *copy = size ? PyMem_Malloc(size) : NULL;
    *moved = 0;
    if (copy) {
        memcpy(copy, completions->items, size);
        *moved = completions->count;
        completions->count = 0;
    }
    return copy;
}

/* The opcode of a completion: borrowed. */
static PyObject *opcode_of(const struct rdmacm_completion *completion) {
    if (!completion->is_recv)
        return PyTuple_GetItem(send_opcodes, completion->opcode);
    return completion->opcode == RDMACM_WR_WRITE_WITH_IMM ? recv_with_imm_opcode : recv_opcode;
}

static PyObject *make_wc(PyObject *wr_id, const struct rdmacm_completion *completion, uint32_t qp_num) {
    if (!wc_class)
        return PyErr_Format(PyExc_RuntimeError, "configure_wc() was not called");
    PyObject *status = PyTuple_GetItem(wc_statuses, completion->status), *opcode = opcode_of(completion);
    bool is_invalidated = completion->word_kind == RDMACM_INVALIDATED;
    PyObject *wc = status && opcode ? allocate_wc(wc_class, 0) : NULL;
    if (!wc)
        return NULL;
    if (!set(wc, WC_WR_ID, Py_NewRef(wr_id)) || !set(wc, WC_STATUS, Py_NewRef(status)) ||
        !set(wc, WC_OPCODE, Py_NewRef(opcode)) ||
        !set(wc, is_invalidated ? WC_IMM_DATA : WC_INVALIDATED_RKEY, Py_NewRef(Py_None)) ||
        !set(wc, WC_SOLICITED, Py_NewRef(completion->solicited ? Py_True : Py_False)) ||
        !set(wc, WC_HAS_GRH, Py_NewRef(completion->is_datagram ? Py_True : Py_False)) ||
        !set(wc, WC_VENDOR_ERR, Py_NewRef(zero)) ||
        !set(wc, WC_BYTE_LEN, PyLong_FromUnsignedLong(completion->byte_len)) ||
        !set(wc, WC_QP_NUM, PyLong_FromUnsignedLong(qp_num)) ||
        !set(wc, is_invalidated ? WC_INVALIDATED_RKEY : WC_IMM_DATA,
             completion->word_kind ? PyLong_FromUnsignedLong(completion->word) : Py_NewRef(Py_None)) ||
        !set(wc, WC_SRC_QP, completion->src_qp ? PyLong_FromUnsignedLong(completion->src_qp) : Py_NewRef(zero)))
        Py_CLEAR(wc);
    return wc;
}

/* Append the WC of a completion to a list, unless it is that of an unsignaled request. */
static bool append_wc(PyObject *completed, const struct rdmacm_completion *completion, uint32_t qp_num) {
    const struct pin *pin = completion->pin;
    if (pin->owner && pin->unsignaled && completion->status == RDMACM_WC_SUCCESS)
        return true;
    PyObject *wr_id = wr_id_of(pin);
    if (wr_id && pin->unsignaled) {
        PyObject *number = wr_id;
        wr_id = PyObject_CallFunctionObjArgs(unsignaled_class, number, NULL);
        Py_DECREF(number);
    }
    PyObject *wc = wr_id ? make_wc(wr_id, completion, qp_num) : NULL;
    bool done = wc && PyList_Append(completed, wc) == 0;
    Py_XDECREF(wc);
    Py_XDECREF(wr_id);
    return done;
}

bool append_wcs(PyObject *completed, struct rdmacm_completion *completions, size_t count, uint32_t qp_num) {
    bool is_right = true;
    for (size_t i = 0; i < count; i++) {
        is_right = is_right && append_wc(completed, &completions[i], qp_num);
        drop_pin(completions[i].pin);
    }
    PyMem_Free(completions);
    return is_right;
}

PyObject *configure_wc(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *wc = PyTuple_Size(args) ? PyTuple_GetItem(args, 0) : NULL;
    if (!wc || !PyType_Check(wc))
        return PyErr_Format(PyExc_TypeError, "a class of completions is wanted");
    if (!find_slots(wc, wc_names, WC_FIELDS, wc_slots))
        return NULL;
    allocate_wc = (allocfunc)PyType_GetSlot((PyTypeObject *)wc, Py_tp_alloc);
    return set_objects(args, 5, (PyObject **)&wc_class, &wc_statuses, &send_opcodes, &recv_opcode,
                       &recv_with_imm_opcode);
}

/* -- queues ---------------------------------------------------------------------------------------------------------- */

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *wire;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "On", &wire, &limit))
        return NULL;
    if (wire != Py_None && !PyObject_TypeCheck(wire, wire_type))
        return PyErr_Format(PyExc_TypeError, "a Wire or None is wanted");
    CompletionQueue *self = new_object(type);
    if (self) {
        self->cq.owner = self;
        self->cq.limit = limit > 0 ? (size_t)limit : 0;
        self->wire = wire == Py_None ? NULL : (Wire *)Py_NewRef(wire);
    }
    return (PyObject *)self;
}

/* In a child of fork(2): a thread that does not exist there may have been about to change the entries, so they stay. */
static bool is_abandoned(const CompletionQueue *self) { return self->wire && !self->wire->wire; }

static void drop_entry(struct rdmacm_entry *entry) {
    if (entry->object)
        Py_DECREF((PyObject *)entry->object);
    else
        drop_pin(entry->completion.pin);
}

/* How many entries are taken out at a time. */
enum { BATCH = 32 };

/* Take the first entries out, at most `most` and BATCH. The mutex is held. */
static size_t pop_entries(struct rdmacm_cq *cq, struct rdmacm_entry *entries, size_t most) {
    return rdmacm_cq_take(cq, entries, most < BATCH ? most : BATCH);
}

/* Drop the completions of a queue pair; NULL: all. */
static void drop_entries(CompletionQueue *self, const uint32_t *qp_num) {
    struct rdmacm_entry entries[BATCH];
    for (size_t count = BATCH; count == BATCH && !is_abandoned(self);) {
        CORE_DO(count = qp_num ? rdmacm_cq_remove(&self->cq, *qp_num, entries, BATCH)
                               : pop_entries(&self->cq, entries, BATCH));
        for (size_t i = 0; i < count; i++)
            drop_entry(&entries[i]);
    }
}

static PyObject *queue_clear_entries(CompletionQueue *self, PyObject *Py_UNUSED(ignored)) {
    drop_entries(self, NULL);
    Py_RETURN_NONE;
}

/* Other threads may change the entries, which have numbers only. */
#define QUEUE_OBJECTS(DO) DO(owner)
TRAVERSE(CompletionQueue, queue, QUEUE_OBJECTS)
CLEAR(CompletionQueue, queue, QUEUE_OBJECTS)

static void queue_dealloc(CompletionQueue *self) {
    PyObject_GC_UnTrack(self);
    if (self->wire && self->wire->wire)
        CORE_DO(RDMACM_UNLIST(self->wire->wire->added, &self->cq, next_added, is_listed));
    drop_entries(self, NULL);
    queue_clear(self);
    if (!is_abandoned(self))
        rdmacm_cq_free(&self->cq);
    Py_XDECREF((PyObject *)self->wire);
    free_object((PyObject *)self);
}

static Py_ssize_t queue_length(CompletionQueue *self) {
    size_t count;
    CORE_DO(count = self->cq.count);
    return (Py_ssize_t)count;
}

static PyObject *queue_add(CompletionQueue *self, PyObject *completions) {
    Py_ssize_t count = PyList_Check(completions) ? PyList_Size(completions) : -1;
    if (count < 0)
        return PyErr_Format(PyExc_TypeError, "a list of completions is wanted");
    Py_ssize_t added = 0;
    for (; added < count; added++) {
        PyObject *wc = Py_XNewRef(PyList_GetItem(completions, added));
        PyObject *number = wc ? PyObject_GetAttr(wc, names.qp_num) : NULL;
        struct rdmacm_entry entry = {.object = wc, .qp_num = number ? (uint32_t)PyLong_AsUnsignedLong(number) : 0};
        Py_XDECREF(number);
        if (PyErr_Occurred()) {
            Py_XDECREF(wc);
            return NULL;
        }
        enter_core();
        bool has_room = self->cq.count < self->cq.limit, done = has_room && rdmacm_cq_push(&self->cq, &entry);
        rdmacm_leave();
        if (!done)
            Py_DECREF(wc);
        if (has_room && !done)
            return PyErr_NoMemory();
        if (!has_room)
            break;
    }
    return PyLong_FromSsize_t(added);
}

static PyObject *wc_of(const struct rdmacm_entry *entry) {
    if (entry->object)
        return entry->object;
    PyObject *wr_id = wr_id_of(entry->completion.pin);
    if (wr_id && (PyObject *)Py_TYPE(wr_id) == unsignaled_class) { /* it has failed */
        PyObject *number = PyNumber_Long(wr_id);
        Py_DECREF(wr_id);
        wr_id = number;
    }
    PyObject *wc = wr_id ? make_wc(wr_id, &entry->completion, entry->qp_num) : NULL;
    Py_XDECREF(wr_id);
    drop_pin(entry->completion.pin);
    return wc;
}

/* Append the completions of `count` entries to a list, which is gone with an exception. */
static void append_all(PyObject **list, const struct rdmacm_entry *entries, size_t count) {
    for (size_t i = 0; i < count; i++)
        append(list, wc_of(&entries[i]));
}

/* The completions of `count` entries that were taken out, and the first ones of the queue after them, at most `most`. */
static PyObject *take(CompletionQueue *self, struct rdmacm_entry *entries, size_t count, size_t most) {
    PyObject *list = PyList_New(0);
    append_all(&list, entries, count);
    while (list && count == BATCH && (most -= count)) {
        CORE_DO(count = pop_entries(&self->cq, entries, most));
        append_all(&list, entries, count);
    }
    return list;
}

static bool has_overrun(CompletionQueue *self) {
    bool has;
    CORE_DO(has = self->cq.overrun);
    return has;
}

static PyObject *queue_poll(CompletionQueue *self, PyObject *argument) {
    Py_ssize_t most = PyLong_AsSsize_t(argument);
    if (most == -1 && PyErr_Occurred())
        return NULL;
    Wire *wire = self->wire;
    if (!wire || !wire->wire || most <= 0)
        Py_RETURN_NONE;
    Lock *lock = wire->lock;
    take_lock(lock);
    struct rdmacm_entry entries[BATCH];
    struct seen seen = {0};
    size_t count = 0;
    size_t at_once = (size_t)most < BATCH ? (size_t)most : BATCH;
    bool is_pythons = !wire->wire;
    /* A first look without the mutex, which the second one takes: a caller that polls finds nothing most of the time. */
    if (!is_pythons && rdmacm_cq_has_any(&self->cq)) {
        enter_core();
        bool has_acks = !self->waited && wire->wire->acks;
        count = pop_entries(&self->cq, entries, at_once);
        look_events(wire, &seen);
        rdmacm_leave();
        self->waited = false;
        if (has_acks)
            acknowledge(wire);
    }
    struct seen later = {0};
    if (!is_pythons && !count)
        is_pythons = poll_wire(wire, &self->cq, &later, entries, at_once, &count) == POLL_IN_PYTHON;
    PyObject *result = take(self, entries, count, (size_t)most);
    bool is_right = see_events(wire, &seen) && see_events(wire, &later);
    if (is_right && result && !PyList_Size(result) && (is_pythons || has_overrun(self)))
        set_object(&result, Py_None);
    else if (!is_right && result && PyList_Size(result))
        PyErr_WriteUnraisable((PyObject *)self); /* the completions are the caller's */
    else if (!is_right)
        Py_CLEAR(result);
    rdmacm_lock_release(&lock->lock);
    return result;
}

static PyObject *queue_take(CompletionQueue *self, PyObject *argument) {
    Py_ssize_t most = PyLong_AsSsize_t(argument);
    if (most == -1 && PyErr_Occurred())
        return NULL;
    struct rdmacm_entry entries[BATCH];
    size_t count = 0;
    if (most > 0 && !is_abandoned(self))
        CORE_DO(count = pop_entries(&self->cq, entries, (size_t)most));
    return take(self, entries, count, (size_t)most);
}

static PyObject *queue_drop(CompletionQueue *self, PyObject *argument) {
    uint32_t qp_num = (uint32_t)PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred())
        return NULL;
    drop_entries(self, &qp_num);
    Py_RETURN_NONE;
}

static PyObject *queue_resize(CompletionQueue *self, PyObject *argument) {
    size_t limit = PyLong_AsSize_t(argument);
    if (limit == (size_t)-1 && PyErr_Occurred())
        return NULL;
    enter_core();
    size_t count = self->cq.count;
    if (count <= limit)
        self->cq.limit = limit;
    rdmacm_leave();
    return PyLong_FromSize_t(count);
}

static PyObject *get_watched(CompletionQueue *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(self->cq.watched);
}

static int set_watched(CompletionQueue *self, PyObject *value, void *Py_UNUSED(closure)) {
    bool watched = value && PyObject_IsTrue(value) > 0;
    CORE_DO(self->cq.watched = watched);
    return 0;
}

static PyGetSetDef queue_getset[] = {
    {"watched", (getter)get_watched, (setter)set_watched, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef queue_members[] = {
    {"waited", T_BOOL, offsetof(CompletionQueue, waited), 0, NULL},
    {"owner", T_OBJECT, offsetof(CompletionQueue, owner), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef queue_methods[] = {
    {"add", (PyCFunction)queue_add, METH_O, "add(list): add completions; how many there was room for."},
    {"resize", (PyCFunction)queue_resize, METH_O,
     "resize(limit): have room for so many, unless there are more; how many there are."},
    {"poll", (PyCFunction)queue_poll, METH_O,
     "poll(count): up to so many completions, after progress if there are none; None: Python has to make it."},
    {"take", (PyCFunction)queue_take, METH_O, "take(count): up to so many completions."},
    {"clear", (PyCFunction)queue_clear_entries, METH_NOARGS, "Drop all completions."},
    {"drop", (PyCFunction)queue_drop, METH_O, "drop(qp_num): drop the completions of a queue pair."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot queue_slots[] = {
    SLOT(tp_doc, "The completions of a queue, oldest first."),
    SLOT(tp_new, queue_new),
    SLOT(tp_traverse, queue_traverse),
    SLOT(tp_clear, queue_clear),
    SLOT(tp_dealloc, queue_dealloc),
    SLOT(tp_members, queue_members),
    SLOT(tp_getset, queue_getset),
    SLOT(tp_methods, queue_methods),
    SLOT(sq_length, queue_length),
    {0, NULL},
};

bool wc_init(PyObject *module) {
    zero = PyLong_FromLong(0);
    queue_type = ADD_TYPE(module, CompletionQueue, Py_TPFLAGS_HAVE_GC, queue_slots);
    return zero && queue_type;
}

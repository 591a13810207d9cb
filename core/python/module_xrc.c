/* Glue: XRC domains. */
#include "module.h"

PyTypeObject *domain_type;

static PyObject *domain_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *regions;
    if (!PyArg_ParseTuple(args, "O!", regions_type, &regions))
        return NULL;
    XrcDomain *self = new_object(type);
    if (!self)
        return NULL;
    self->regions = Py_NewRef(regions);
    self->members = PyDict_New();
    return finish_object(self, self->members);
}

#define DOMAIN_OBJECTS(DO) DO(members) DO(regions)
TRAVERSE(XrcDomain, domain, DOMAIN_OBJECTS)

static int domain_clear(XrcDomain *self) {
    CORE_DO(rdmacm_table_free(&self->queues)); /* before what it refers to ends */
    DOMAIN_OBJECTS(CLEAR_OBJECT)
    return 0;
}

static void domain_dealloc(XrcDomain *self) {
    PyObject_GC_UnTrack(self);
    domain_clear(self);
    free_object((PyObject *)self);
}

static PyObject *domain_add(XrcDomain *self, PyObject *args) {
    PyObject *number, *shared, *queue;
    uint64_t srqn;
    if (!PyArg_ParseTuple(args, "OO!O", &number, shared_type, &shared, &queue))
        return NULL;
    if (!number_of(number, RDMACM_QPN_MASK, &srqn) || (queue != Py_None && !PyObject_TypeCheck(queue, queue_type)) ||
        ((SharedReceives *)shared)->regions != self->regions)
        return PyErr_Format(PyExc_ValueError, "a number of 24 bits, receives of the device, and a queue or None are wanted");
    SharedReceives *receives = (SharedReceives *)shared;
    receives->is_shared = true; /* targets may join a wire at any time */
    enter_core();
    bool done = rdmacm_table_add(&self->queues, (uint32_t)srqn, &receives->srq);
    if (done) {
        receives->srq.pd = receives->rules.pd;
        receives->srq.cq = queue == Py_None ? NULL : &((CompletionQueue *)queue)->cq;
    }
    rdmacm_leave();
    if (!done)
        return PyErr_Format(PyExc_ValueError, "a number that is in use, or no memory");
    PyObject *members = PyTuple_Pack(2, shared, queue);
    done = members && PyDict_SetItem(self->members, number, members) == 0;
    Py_XDECREF(members);
    if (done)
        Py_RETURN_NONE;
    CORE_DO(rdmacm_table_remove(&self->queues, (uint32_t)srqn));
    return NULL;
}

static PyObject *domain_remove(XrcDomain *self, PyObject *number) {
    uint64_t srqn;
    if (!number_of(number, RDMACM_QPN_MASK, &srqn))
        return PyErr_Format(PyExc_ValueError, "a number of 24 bits is wanted");
    CORE_DO(rdmacm_table_remove(&self->queues, (uint32_t)srqn));
    return PyDict_DelItem(self->members, number) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef domain_methods[] = {
    {"add", (PyCFunction)domain_add, METH_VARARGS,
     "add(number, receives, queue): a shared receive queue, and the queue where it completes, or None."},
    {"remove", (PyCFunction)domain_remove, METH_O, "remove(number): it is closed."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot domain_slots[] = {
    SLOT(tp_doc, "XrcDomain(regions): the shared receive queues of an XRC domain, by number."),
    SLOT(tp_new, domain_new),
    SLOT(tp_traverse, domain_traverse),
    SLOT(tp_clear, domain_clear),
    SLOT(tp_dealloc, domain_dealloc),
    SLOT(tp_methods, domain_methods),
    {0, NULL},
};

bool xrc_init(PyObject *module) {
    domain_type = ADD_TYPE(module, XrcDomain, Py_TPFLAGS_HAVE_GC, domain_slots);
    return domain_type != NULL;
}

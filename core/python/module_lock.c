/* Glue: the lock of a runtime, and the mutex of the core.
 *
 * No thread waits for the interpreter's lock with the mutex: the thread that serves peers would wait for both. So the
 * mutex is taken after the interpreter's lock is released, and given back before that is taken again; or it is taken for
 * a few steps that call nothing of Python.
 */
#include "module.h"

PyTypeObject *lock_type;

/* -- the lock -------------------------------------------------------------------------------------------------------- */

static PyObject *lock_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords)) {
    Lock *self = new_object(type);
    return self && !rdmacm_lock_init(&self->lock) ? finish_object(self, PyErr_NoMemory()) : (PyObject *)self;
}

static void lock_dealloc(Lock *self) {
    /* Not destroyed where a thread has it that fork(2) has not copied. */
    if (!atomic_load(&self->lock.owner))
        rdmacm_lock_destroy(&self->lock);
    free_object((PyObject *)self);
}

void take_lock(Lock *lock) {
    rdmacm_check_outside("the lock of a runtime is waited for");
    if (rdmacm_lock_try(&lock->lock))
        return;
    Py_BEGIN_ALLOW_THREADS
    rdmacm_lock_take(&lock->lock);
    Py_END_ALLOW_THREADS
}

static PyObject *lock_acquire(Lock *self, PyObject *args) {
    int blocking = 1;
    if (!PyArg_ParseTuple(args, "|p", &blocking))
        return NULL;
    if (!blocking)
        return PyBool_FromLong(rdmacm_lock_try(&self->lock));
    take_lock(self);
    Py_RETURN_TRUE;
}

static PyObject *lock_enter(Lock *self, PyObject *Py_UNUSED(ignored)) {
    take_lock(self);
    Py_RETURN_TRUE;
}

static PyObject *lock_release(Lock *self, PyObject *Py_UNUSED(ignored)) {
    if (!rdmacm_lock_release(&self->lock))
        return PyErr_Format(PyExc_RuntimeError, "cannot release a lock that this thread does not have");
    Py_RETURN_NONE;
}

static PyObject *lock_exit(Lock *self, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(count)) {
    return lock_release(self, NULL);
}

static PyMethodDef lock_methods[] = {
    {"acquire", (PyCFunction)lock_acquire, METH_VARARGS, "acquire(blocking=True): whether it was taken."},
    {"release", (PyCFunction)lock_release, METH_NOARGS, "Undo acquire()."},
    {"__enter__", (PyCFunction)lock_enter, METH_NOARGS, "acquire()"},
    {"__exit__", (PyCFunction)(void (*)(void))lock_exit, METH_FASTCALL, "release()"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot lock_slots[] = {
    SLOT(tp_doc, "A lock as threading.RLock, which threads without an interpreter can take too."),
    SLOT(tp_new, lock_new),
    SLOT(tp_dealloc, lock_dealloc),
    SLOT(tp_methods, lock_methods),
    {0, NULL},
};

/* -- the mutex ------------------------------------------------------------------------------------------------------- */

/* How often a thread lets others have the interpreter while it waits for the mutex. */
enum { PATIENCE = 4 };

void enter_core(void) {
    for (int i = 0; !rdmacm_try_enter(); i++) {
        if (i == PATIENCE) {
            rdmacm_enter(); /* its holder does not need the interpreter */
            return;
        }
        end_core(begin_core());
    }
}

bool enter_shared(const bool *is_shared) {
    if (*is_shared)
        enter_core();
    return *is_shared;
}

void leave_shared(bool is_entered) {
    if (is_entered)
        rdmacm_leave();
}

PyThreadState *begin_core(void) {
    rdmacm_check_outside("the interpreter is released");
    PyThreadState *state = PyEval_SaveThread();
    rdmacm_enter();
    return state;
}

void end_core(PyThreadState *state) {
    rdmacm_leave();
    PyEval_RestoreThread(state);
}

bool lock_init(PyObject *module) {
    lock_type = ADD_TYPE(module, Lock, 0, lock_slots);
    return lock_type != NULL;
}

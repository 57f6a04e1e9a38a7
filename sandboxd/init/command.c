/* command.c - what an M_EXEC says: the parser of its payload. Runs in the child that becomes it. */
#include "init.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define KNOWN_FLAGS                                                                                \
    (EXEC_PAYLOAD_FD | EXEC_STDIN | EXEC_DETACH | EXEC_SHELL | EXEC_LOGIN | EXEC_CWD_CREATE |      \
     EXEC_MERGE_STDERR | EXEC_TTY | EXEC_STATUS)

static int load_payload(const struct inbox *in, const uint8_t **at, size_t *len) {
    *at = in->payload;
    *len = in->head.len;
    if (!(in->head.flags & EXEC_PAYLOAD_FD))
        return 0;
    struct stat st;
    errno = EBADMSG;
    if (in->fd_count != 1 || fstat(in->fds[0], &st) || st.st_size <= 0)
        return -1;
    errno = E2BIG;
    if (st.st_size > (off_t)PAYLOAD_MAX)
        return -1;
    uint8_t *copy =
        mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED)
        return -1;
    size_t have = 0;
    while (have < (size_t)st.st_size) {
        ssize_t got = pread(in->fds[0], copy + have, (size_t)st.st_size - have, (off_t)have);
        errno = EBADMSG;
        if (got <= 0)
            return -1;
        have += (size_t)got;
    }
    *at = copy;
    *len = have;
    return 0;
}

int command_parse(const struct inbox *in, struct command *out) {
    const uint8_t *cursor, *end;
    size_t len;
    errno = EINVAL;
    out->flags = in->head.flags;
    if (out->flags & ~(uint32_t)KNOWN_FLAGS)
        return -1;
    if (load_payload(in, &cursor, &len))
        return -1;
    end = cursor + len;
    errno = EBADMSG;
    if (len < sizeof out->req)
        return -1;
    memcpy(&out->req, cursor, sizeof out->req);
    cursor += sizeof out->req;
    out->user = wire_string(&cursor, end);
    out->cwd = wire_string(&cursor, end);
    if (!out->cwd || !out->req.argc)
        return -1;
    errno = E2BIG;
    if (out->req.argc > ARGS_MAX || out->req.envc > ARGS_MAX)
        return -1;
    errno = EBADMSG;
    for (uint32_t i = 0; i < out->req.argc; i++)
        if (!(out->argv[i] = wire_string(&cursor, end)))
            return -1;
    for (uint32_t i = 0; i < out->req.envc; i++)
        if (!(out->envp[i] = wire_string(&cursor, end)))
            return -1;
    out->argv[out->req.argc] = out->envp[out->req.envc] = NULL;
    return cursor == end ? 0 : -1;
}

const char *command_env(const struct command *command, const char *name) {
    size_t len = strlen(name);
    for (uint32_t i = 0; i < command->req.envc; i++)
        if (!strncmp(command->envp[i], name, len) && command->envp[i][len] == '=')
            return command->envp[i] + len + 1;
    return NULL;
}

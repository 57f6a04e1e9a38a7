/* wire.c - messages of protocol.h over a SOCK_SEQPACKET socket. */
#include "init.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

void wire_close_fds(struct inbox *in) {
    for (int i = 0; i < in->fd_count; i++)
        if (in->fds[i] >= 0)
            close(in->fds[i]);
    in->fd_count = 0;
}

int wire_receive(int fd, struct inbox *in, int flags) {
    union {
        char bytes[CMSG_SPACE(sizeof(int) * MSG_FDS_MAX)];
        struct cmsghdr align;
    } control;
    struct iovec parts[2] = {{&in->head, sizeof in->head}, {in->payload, MSG_MAX}};
    struct msghdr msg = {.msg_iov = parts,
                         .msg_iovlen = 2,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof control.bytes};
    in->fd_count = 0;
    in->head = (struct msg){0, 0, 0, 0};
    ssize_t got;
    do
        got = recvmsg(fd, &msg, flags | MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int one;
            memcpy(&one, CMSG_DATA(c) + i * sizeof one, sizeof one);
            if (in->fd_count < MSG_FDS_MAX)
                in->fds[in->fd_count++] = one;
            else
                close(one);
        }
    }
    if (got == 0) {
        wire_close_fds(in); /* an empty datagram is an end too, and may bring some */
        return 0;
    }
    if ((size_t)got < sizeof in->head || (msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) ||
        in->head.len != (size_t)got - sizeof in->head) {
        wire_close_fds(in);
        if ((size_t)got < sizeof in->head)
            in->head = (struct msg){0, 0, 0, 0};
        errno = EBADMSG;
        return -1;
    }
    in->payload[in->head.len] = 0;
    return 1;
}

int wire_send(int fd, uint32_t type, uint32_t id, const void *payload, uint32_t len, const int *fds,
              int fd_count, int flags) {
    union {
        char bytes[CMSG_SPACE(sizeof(int) * MSG_FDS_MAX)];
        struct cmsghdr align;
    } control;
    struct msg head = {.type = type, .id = id, .len = len};
    struct iovec parts[2] = {{&head, sizeof head}, {(void *)(uintptr_t)payload, len}};
    struct msghdr msg = {.msg_iov = parts, .msg_iovlen = len ? 2 : 1};
    if (fd_count > 0) {
        memset(&control, 0, sizeof control);
        msg.msg_control = control.bytes;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)fd_count);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)fd_count);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)fd_count);
    }
    ssize_t sent;
    do
        sent = sendmsg(fd, &msg, flags | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -1 : 0;
}

const char *wire_string(const uint8_t **cursor, const uint8_t *end) {
    const uint8_t *start = *cursor;
    if (start >= end)
        return NULL;
    const uint8_t *nul = memchr(start, 0, (size_t)(end - start));
    if (!nul)
        return NULL;
    *cursor = nul + 1;
    return (const char *)start;
}

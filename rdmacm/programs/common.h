/* What the programs share: checks that end them, addresses, and events. */
#ifndef COMMON_H
#define COMMON_H

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <rdma/rdma_cma.h>

/* Private data arrives with these lengths, zeros behind what was sent. */
enum { REQUEST_PRIVATE = 56, REPLY_PRIVATE = 196, REJECT_PRIVATE = 148 };

#define CHECK(condition)                                                                   \
	do {                                                                               \
		if (!(condition)) {                                                        \
			fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__,    \
				#condition, strerror(errno));                              \
			exit(1);                                                           \
		}                                                                          \
	} while (0)

/*
 * No program has a time by which it must have ended: the machine may have much else to do, and whoever has started it ends
 * what takes too long. What it has started itself ends with it, by this.
 */
static inline void end_with_parent(void)
{
	CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
}

static inline struct sockaddr_in address_of(const char *text, int port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };

	CHECK(inet_pton(AF_INET, text, &address.sin_addr) == 1);
	return address;
}

/* The next event, which must be of a kind and have a status; to be acknowledged. */
static inline struct rdma_cm_event *expect(struct rdma_event_channel *channel,
					   enum rdma_cm_event_type kind, int status)
{
	struct rdma_cm_event *event;

	CHECK(rdma_get_cm_event(channel, &event) == 0);
	if (event->event != kind || event->status != status) {
		fprintf(stderr, "expected %s, status %d; there is %s, status %d\n",
			rdma_event_str(kind), status, rdma_event_str(event->event), event->status);
		exit(1);
	}
	return event;
}

/* As `expect`, for what need not be looked at. */
static inline void pass(struct rdma_event_channel *channel, enum rdma_cm_event_type kind, int status)
{
	CHECK(rdma_ack_cm_event(expect(channel, kind, status)) == 0);
}

/* Private data of a number, with as many bytes as wanted. */
static inline void fill(unsigned char *bytes, int len, unsigned number)
{
	for (int at = 0; at < len; at++)
		bytes[at] = (unsigned char)(number * 31 + at + 1);
}

/* Whether an event brings what `fill` made, and zeros up to the length of its message. */
static inline int brings(const struct rdma_cm_event *event, int len, unsigned number, int whole)
{
	unsigned char wanted[256] = { 0 };

	fill(wanted, len, number);
	return event->param.conn.private_data_len == whole &&
	       memcmp(event->param.conn.private_data, wanted, whole) == 0;
}

static inline void create_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
		.cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	CHECK(rdma_create_qp(id, NULL, &init) == 0);
}

/* From a new identifier to one that can connect. */
static inline struct rdma_cm_id *resolved(struct rdma_event_channel *channel,
					  struct sockaddr_in to)
{
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000) == 0);
	pass(channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	CHECK(rdma_resolve_route(id, 2000) == 0);
	pass(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	return id;
}

/* One that listens; at a free port, if the port is 0. */
static inline struct rdma_cm_id *listener(struct rdma_event_channel *channel,
					  struct sockaddr_in at)
{
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&at) == 0);
	CHECK(rdma_listen(id, 16) == 0);
	return id;
}

static inline int count_descriptors(void)
{
	DIR *all = opendir("/proc/self/fd");
	int count = 0;

	CHECK(all);
	while (readdir(all))
		count++;
	closedir(all);
	return count;
}

#endif

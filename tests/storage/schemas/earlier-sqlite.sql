BEGIN TRANSACTION;
CREATE TABLE audit_log (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    at DOUBLE PRECISION NOT NULL,
    actor TEXT NOT NULL,
    token_id TEXT NOT NULL,
    action TEXT NOT NULL,
    subject TEXT NOT NULL,
    detail TEXT NOT NULL,
    request_id TEXT NOT NULL
, share TEXT NOT NULL DEFAULT '');
CREATE TABLE budget_alerts (
    scope TEXT,
    unit TEXT,
    percent INTEGER,
    limit_amount BIGINT NOT NULL,
    told_until DOUBLE PRECISION,
    PRIMARY KEY (scope, unit, percent)
) WITHOUT ROWID;
CREATE TABLE bulk_retries (
    task_id TEXT PRIMARY KEY,
    retried_as TEXT NOT NULL,
    is_submitted INTEGER NOT NULL DEFAULT 0,
    at DOUBLE PRECISION NOT NULL
);
CREATE TABLE calls (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL,
    agent_id TEXT NOT NULL,
    model TEXT NOT NULL,
    upstream TEXT NOT NULL,
    state TEXT NOT NULL,
    slot TEXT,
    task_id TEXT,
    record TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE configured_budgets (
    scope TEXT PRIMARY KEY
) WITHOUT ROWID;
INSERT INTO "configured_budgets" VALUES('project:evals');
INSERT INTO "configured_budgets" VALUES('session:eval');
CREATE TABLE counters (
    name TEXT PRIMARY KEY,
    amount BIGINT NOT NULL
) WITHOUT ROWID;
INSERT INTO "counters" VALUES('completed',2);
INSERT INTO "counters" VALUES('ended_bytes',1092);
INSERT INTO "counters" VALUES('kept_done',2);
INSERT INTO "counters" VALUES('live_bytes',1442);
INSERT INTO "counters" VALUES('queued',3);
INSERT INTO "counters" VALUES('scheduled',2);
INSERT INTO "counters" VALUES('started',2);
INSERT INTO "counters" VALUES('submitted',5);
INSERT INTO "counters" VALUES('tick',2);
INSERT INTO "counters" VALUES('wait_ms',4);
CREATE TABLE deliveries (
    id TEXT PRIMARY KEY,
    task_id TEXT NOT NULL,
    event TEXT NOT NULL,
    url TEXT NOT NULL,
    host TEXT NOT NULL,
    state TEXT NOT NULL,
    tries INTEGER NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    due_at DOUBLE PRECISION,
    claimed_by TEXT,
    ended_at DOUBLE PRECISION,
    status INTEGER,
    error TEXT
, project_id TEXT NOT NULL DEFAULT '') WITHOUT ROWID;
CREATE TABLE delivery_bodies (
    id TEXT PRIMARY KEY,
    body TEXT NOT NULL
);
CREATE TABLE delivery_tries (
    id TEXT PRIMARY KEY,
    filed_at DOUBLE PRECISION NOT NULL,
    tries TEXT NOT NULL
);
CREATE TABLE dispatcher (
    only_row INTEGER PRIMARY KEY,
    node_id TEXT NOT NULL,
    epoch BIGINT NOT NULL,
    lease_until DOUBLE PRECISION NOT NULL,
    address TEXT NOT NULL
);
INSERT INTO "dispatcher" VALUES(1,'',1,0.0,'');
CREATE TABLE estimates (
    project_id TEXT,
    name TEXT,
    action TEXT,
    fed_at DOUBLE PRECISION NOT NULL,
    learned TEXT NOT NULL,
    PRIMARY KEY (project_id, name, action)
) WITHOUT ROWID;
CREATE TABLE forgotten_lanes (
    project_id TEXT PRIMARY KEY,
    submitted BIGINT NOT NULL,
    completed BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    cancelled BIGINT NOT NULL,
    rejected BIGINT NOT NULL,
    expired BIGINT NOT NULL,
    started BIGINT NOT NULL,
    wait_ms BIGINT NOT NULL
) WITHOUT ROWID;
CREATE TABLE gate_closures (
    kind TEXT,
    name TEXT,
    closed_until DOUBLE PRECISION,
    why TEXT NOT NULL, cause TEXT NOT NULL DEFAULT '', closed_by TEXT NOT NULL DEFAULT '', task_id TEXT NOT NULL DEFAULT '', closed_at DOUBLE PRECISION,
    PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE TABLE headgate_schema (part TEXT PRIMARY KEY, version INTEGER NOT NULL);
INSERT INTO "headgate_schema" VALUES('ledger',3);
INSERT INTO "headgate_schema" VALUES('tasks',8);
INSERT INTO "headgate_schema" VALUES('deliveries',3);
INSERT INTO "headgate_schema" VALUES('submit_keys',2);
INSERT INTO "headgate_schema" VALUES('tokens',1);
INSERT INTO "headgate_schema" VALUES('usage',6);
INSERT INTO "headgate_schema" VALUES('administration',2);
INSERT INTO "headgate_schema" VALUES('workers',1);
INSERT INTO "headgate_schema" VALUES('estimates',1);
INSERT INTO "headgate_schema" VALUES('slots',1);
INSERT INTO "headgate_schema" VALUES('calls',1);
INSERT INTO "headgate_schema" VALUES('task_calls',1);
CREATE TABLE lanes (
    agent_id TEXT,
    project_id TEXT,
    queued BIGINT NOT NULL,
    inflight BIGINT NOT NULL,
    submitted BIGINT NOT NULL,
    completed BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    cancelled BIGINT NOT NULL,
    rejected BIGINT NOT NULL,
    expired BIGINT NOT NULL,
    started BIGINT NOT NULL,
    wait_ms BIGINT NOT NULL,
    served_tick BIGINT NOT NULL, scheduled BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (agent_id, project_id)
) WITHOUT ROWID;
INSERT INTO "lanes" VALUES('a','evals',3,0,5,2,0,0,0,0,2,4,1,2);
CREATE TABLE ledger_balances (
    scope TEXT,
    bucket_start BIGINT,
    spent_micro_usd BIGINT NOT NULL, reserved_micro_usd BIGINT NOT NULL, overrun_micro_usd BIGINT NOT NULL, spent_tokens BIGINT NOT NULL, reserved_tokens BIGINT NOT NULL, overrun_tokens BIGINT NOT NULL, unaccepted_micro_usd BIGINT NOT NULL DEFAULT 0, unaccepted_tokens BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, bucket_start)
) WITHOUT ROWID;
INSERT INTO "ledger_balances" VALUES('',0,200000,0,0,200,0,0,0,0);
INSERT INTO "ledger_balances" VALUES('project:evals',1794985200,200000,0,0,200,0,0,0,0);
INSERT INTO "ledger_balances" VALUES('session:eval',0,200000,0,0,200,0,0,0,0);
CREATE TABLE ledger_checkpoint (
    scope TEXT,
    bucket_start BIGINT,
    spent_micro_usd BIGINT NOT NULL, reserved_micro_usd BIGINT NOT NULL, overrun_micro_usd BIGINT NOT NULL, spent_tokens BIGINT NOT NULL, reserved_tokens BIGINT NOT NULL, overrun_tokens BIGINT NOT NULL, unaccepted_micro_usd BIGINT NOT NULL DEFAULT 0, unaccepted_tokens BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, bucket_start)
) WITHOUT ROWID;
CREATE TABLE ledger_journal (
    seq INTEGER PRIMARY KEY,
    at DOUBLE PRECISION NOT NULL,
    reservation_id TEXT NOT NULL,
    call TEXT NOT NULL,
    charges TEXT NOT NULL,
    spent_micro_usd BIGINT NOT NULL, reserved_micro_usd BIGINT NOT NULL, overrun_micro_usd BIGINT NOT NULL, spent_tokens BIGINT NOT NULL, reserved_tokens BIGINT NOT NULL, overrun_tokens BIGINT NOT NULL
, unaccepted_micro_usd BIGINT NOT NULL DEFAULT 0, unaccepted_tokens BIGINT NOT NULL DEFAULT 0);
INSERT INTO "ledger_journal" VALUES(1,1.79498599884361839293e+09,'tsk_01m7pr1efrjgzgef7qdzk4nwsk:1:1','reserve','[["",0],["project:evals",1794985200],["session:eval",0]]',0,100000,0,0,100,0,0,0);
INSERT INTO "ledger_journal" VALUES(2,1.79498599884507107739e+09,'tsk_01m7pr1efrjgzgef7qdzk4nwsk:1:1','commit','[["",0],["project:evals",1794985200],["session:eval",0]]',100000,-100000,0,100,-100,0,0,0);
INSERT INTO "ledger_journal" VALUES(3,1.7949859988669543266e+09,'tsk_01m7pr1egjb1f9hfrs19ys6jme:1:1','reserve','[["",0],["project:evals",1794985200],["session:eval",0]]',0,100000,0,0,100,0,0,0);
INSERT INTO "ledger_journal" VALUES(4,1.79498599886830401423e+09,'tsk_01m7pr1egjb1f9hfrs19ys6jme:1:1','commit','[["",0],["project:evals",1794985200],["session:eval",0]]',100000,-100000,0,100,-100,0,0,0);
CREATE TABLE ledger_limits (
    scope TEXT PRIMARY KEY,
    limit_micro_usd BIGINT,
    limit_tokens BIGINT,
    time_window TEXT NOT NULL
, is_by_tenant INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
INSERT INTO "ledger_limits" VALUES('project:evals',NULL,1000000,'rolling:24h',0);
INSERT INTO "ledger_limits" VALUES('session:eval',5000000,NULL,'none',0);
CREATE TABLE ledger_outbox (
    reservation_id TEXT PRIMARY KEY,
    call TEXT NOT NULL,
    micro_usd BIGINT NOT NULL,
    tokens BIGINT NOT NULL
, claimed_for_project TEXT, claimed_for_agent TEXT) WITHOUT ROWID;
CREATE TABLE ledger_reservations (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    lease_until DOUBLE PRECISION NOT NULL,
    charges TEXT NOT NULL,
    micro_usd BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    dispatched_at_once INTEGER NOT NULL,
    actual_micro_usd BIGINT,
    actual_tokens BIGINT,
    finished_at DOUBLE PRECISION
, kind TEXT NOT NULL DEFAULT '') WITHOUT ROWID;
INSERT INTO "ledger_reservations" VALUES('tsk_01m7pr1efrjgzgef7qdzk4nwsk:1:1','committed',253402300800.0,'[["",0],["project:evals",1794985200],["session:eval",0]]',100000,100,1,100000,100,1.79498599884507107739e+09,'');
INSERT INTO "ledger_reservations" VALUES('tsk_01m7pr1egjb1f9hfrs19ys6jme:1:1','committed',253402300800.0,'[["",0],["project:evals",1794985200],["session:eval",0]]',100000,100,1,100000,100,1.79498599886830401423e+09,'');
CREATE TABLE messages (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    recipient TEXT NOT NULL,
    kind TEXT NOT NULL,
    task_id TEXT NOT NULL
);
CREATE TABLE nodes (
    id TEXT PRIMARY KEY,
    capacity INTEGER NOT NULL,
    address TEXT NOT NULL,
    lease_until DOUBLE PRECISION NOT NULL
) WITHOUT ROWID;
CREATE TABLE overrides (
    kind TEXT,
    name TEXT,
    key TEXT,
    value TEXT NOT NULL,
    file_value TEXT NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    made_by TEXT NOT NULL,
    PRIMARY KEY (kind, name, key)
);
CREATE TABLE project_counts (
    project_id TEXT PRIMARY KEY,
    queued BIGINT NOT NULL,
    scheduled BIGINT NOT NULL,
    live_bytes BIGINT NOT NULL,
    ended BIGINT NOT NULL,
    ended_bytes BIGINT NOT NULL,
    refused BIGINT NOT NULL
, calls BIGINT NOT NULL DEFAULT 0, call_bytes BIGINT NOT NULL DEFAULT 0) WITHOUT ROWID;
INSERT INTO "project_counts" VALUES('evals',3,2,1442,2,1092,0,0,0);
CREATE TABLE project_usage (
    project_id TEXT,
    hour BIGINT,
    tokens BIGINT NOT NULL,
    micro_usd BIGINT NOT NULL,
    started BIGINT NOT NULL,
    completed BIGINT NOT NULL,
    forgiven BIGINT NOT NULL,
    PRIMARY KEY (project_id, hour)
) WITHOUT ROWID;
INSERT INTO "project_usage" VALUES('evals',1794985200,200,200000,2,2,0);
CREATE TABLE rate_counts (
    limit_id TEXT,
    bucket BIGINT,
    amount BIGINT NOT NULL,
    PRIMARY KEY (limit_id, bucket)
) WITHOUT ROWID;
CREATE TABLE retention_cuts (
    setting TEXT PRIMARY KEY,
    amount DOUBLE PRECISION NOT NULL,
    task_id TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE slot_versions (last_version BIGINT NOT NULL);
INSERT INTO "slot_versions" VALUES(0);
CREATE TABLE slots (
    name TEXT PRIMARY KEY,
    version BIGINT NOT NULL,
    changed_at DOUBLE PRECISION NOT NULL,
    kept TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE submit_key_owners (
    owner TEXT PRIMARY KEY,
    key_count BIGINT NOT NULL,
    bytes BIGINT NOT NULL
) WITHOUT ROWID
;
CREATE TABLE submit_keys (
    owner TEXT,
    name TEXT,
    digest TEXT NOT NULL,
    entries TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    kept_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (owner, name)
) WITHOUT ROWID
;
CREATE TABLE task_calls (
    task_id TEXT NOT NULL,
    attempt BIGINT NOT NULL,
    model TEXT NOT NULL,
    slot TEXT NOT NULL,
    calls BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    micro_usd BIGINT NOT NULL,
    beside_tokens BIGINT NOT NULL,
    beside_micro_usd BIGINT NOT NULL,
    assumed_tokens BIGINT NOT NULL,
    assumed_micro_usd BIGINT NOT NULL,
    unpriced_tokens BIGINT NOT NULL,
    PRIMARY KEY (task_id, attempt, model, slot)
) WITHOUT ROWID;
CREATE TABLE task_inputs (
    id TEXT PRIMARY KEY,
    submission TEXT NOT NULL
);
INSERT INTO "task_inputs" VALUES('tsk_01m7pr1efrjgzgef7qdzk4nwsk','{"action":"work","params":{"n":0}}');
INSERT INTO "task_inputs" VALUES('tsk_01m7pr1egjb1f9hfrs19ys6jme','{"action":"work","params":{"n":1}}');
INSERT INTO "task_inputs" VALUES('tsk_01m7pr1eha5naf39f5fv6x8gvj','{"action":"work"}');
INSERT INTO "task_inputs" VALUES('tsk_01m7pr1ehf139167d3y4z1abha','{"action":"work"}');
INSERT INTO "task_inputs" VALUES('tsk_01m7pr1ehkbfexhq3sf525ctz1','{"action":"work"}');
CREATE TABLE task_parents (
    parent_id TEXT,
    task_id TEXT,
    PRIMARY KEY (parent_id, task_id)
) WITHOUT ROWID;
INSERT INTO "task_parents" VALUES('tsk_01m7pr1ehf139167d3y4z1abha','tsk_01m7pr1ehkbfexhq3sf525ctz1');
CREATE TABLE task_token_secrets (
    name TEXT PRIMARY KEY,
    secret TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE tasks (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL,
    agent_id TEXT,
    state TEXT NOT NULL,
    spec TEXT NOT NULL,
    progress TEXT NOT NULL,
    evictable_since DOUBLE PRECISION,
    settled_by TEXT,
    error TEXT,
    result TEXT,
    tokens BIGINT,
    micro_usd BIGINT
, eviction_rank INTEGER) WITHOUT ROWID;
INSERT INTO "tasks" VALUES('tsk_01m7pr1efrjgzgef7qdzk4nwsk','evals','a','done','[{"id":"tsk_01m7pr1efrjgzgef7qdzk4nwsk","project_id":"evals","agent_id":"a","priority":0,"weight":1.0,"status":"queued","created_at":1794985998.8405085,"enqueued_tick":0,"estimate_tokens":100,"deadline":null,"not_before":null,"scopes":["project:evals","session:eval"],"target":"echo","slot":null,"provider":null,"has_usd_estimate":true,"has_claims":false,"is_call":false,"parent_id":null},{"estimate_micro_usd":100000,"action":"work","attempt_seconds":3600.0},1,null,34]','{"attempt":1,"reservation_id":"tsk_01m7pr1efrjgzgef7qdzk4nwsk:1:1","reserved_tokens":100,"reserved_micro_usd":100000,"share_tokens":100,"used_tokens":100,"used_micro_usd":100000,"started_at":1794985998.8436184,"completed_at":1794985998.845071,"assumed_tokens":100,"assumed_micro_usd":100000,"choice":{}}',1.79498599884507107739e+09,'31ab471df72147f3b068b76c8eb119aa',NULL,'{"echo":{"action":"work","params":{"n":0}}}',100,100000,2);
INSERT INTO "tasks" VALUES('tsk_01m7pr1egjb1f9hfrs19ys6jme','evals','a','done','[{"id":"tsk_01m7pr1egjb1f9hfrs19ys6jme","project_id":"evals","agent_id":"a","priority":0,"weight":1.0,"status":"queued","created_at":1794985998.86638,"enqueued_tick":1,"estimate_tokens":100,"deadline":null,"not_before":null,"scopes":["project:evals","session:eval"],"target":"echo","slot":null,"provider":null,"has_usd_estimate":true,"has_claims":false,"is_call":false,"parent_id":null},{"estimate_micro_usd":100000,"action":"work","attempt_seconds":3600.0},1,null,34]','{"attempt":1,"reservation_id":"tsk_01m7pr1egjb1f9hfrs19ys6jme:1:1","reserved_tokens":100,"reserved_micro_usd":100000,"share_tokens":100,"used_tokens":100,"used_micro_usd":100000,"started_at":1794985998.8669543,"completed_at":1794985998.868304,"assumed_tokens":100,"assumed_micro_usd":100000,"choice":{}}',1.79498599886830401423e+09,'31ab471df72147f3b068b76c8eb119aa',NULL,'{"echo":{"action":"work","params":{"n":1}}}',100,100000,2);
INSERT INTO "tasks" VALUES('tsk_01m7pr1eha5naf39f5fv6x8gvj','evals','a','queued','[{"id":"tsk_01m7pr1eha5naf39f5fv6x8gvj","project_id":"evals","agent_id":"a","priority":0,"weight":1.0,"status":"queued","created_at":1794985998.8906949,"enqueued_tick":2,"estimate_tokens":100,"deadline":null,"not_before":4070908800.0,"scopes":["project:evals","session:eval"],"target":"echo","slot":null,"provider":null,"has_usd_estimate":true,"has_claims":false,"is_call":false,"parent_id":null},{"estimate_micro_usd":100000,"action":"work","attempt_seconds":3600.0},1,null,17]','{}',NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "tasks" VALUES('tsk_01m7pr1ehf139167d3y4z1abha','evals','a','queued','[{"id":"tsk_01m7pr1ehf139167d3y4z1abha","project_id":"evals","agent_id":"a","priority":0,"weight":1.0,"status":"queued","created_at":1794985998.8957257,"enqueued_tick":2,"estimate_tokens":null,"deadline":null,"not_before":4070908800.0,"scopes":["project:evals"],"target":"echo","slot":null,"provider":null,"has_usd_estimate":false,"has_claims":false,"is_call":false,"parent_id":null},{"action":"work","attempt_seconds":3600.0},2,null,17]','{"dependants":1}',NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "tasks" VALUES('tsk_01m7pr1ehkbfexhq3sf525ctz1','evals','a','queued','[{"id":"tsk_01m7pr1ehkbfexhq3sf525ctz1","project_id":"evals","agent_id":"a","priority":0,"weight":1.0,"status":"queued","created_at":1794985998.899009,"enqueued_tick":2,"estimate_tokens":null,"deadline":null,"not_before":null,"scopes":["project:evals"],"target":"echo","slot":null,"provider":null,"has_usd_estimate":false,"has_claims":false,"is_call":false,"parent_id":null},{"action":"work","depends_on":["tsk_01m7pr1ehf139167d3y4z1abha"],"attempt_seconds":3600.0},1,null,17]','{"waiting_for":1}',NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE tokens (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    permissions TEXT NOT NULL,
    secret_hash TEXT NOT NULL,
    agent_id TEXT,
    project_id TEXT,
    least_priority BIGINT,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION,
    revoked_at DOUBLE PRECISION
);
INSERT INTO "tokens" VALUES('9ddc40e48d87','first','submit,read,cancel,admin','e9c380d0fba8436ba43c72d9165c854e82ee8bea9fb968dcc917faa524f8c241',NULL,NULL,NULL,1.79498599872470426556e+09,NULL,NULL);
CREATE TABLE "usage_rows" (
    hour BIGINT,
    project_id TEXT,
    agent_id TEXT,
    model TEXT,
    slot TEXT,
    tasks BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    calls BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    micro_usd BIGINT NOT NULL,
    assumed_tokens BIGINT NOT NULL,
    assumed_micro_usd BIGINT NOT NULL,
    unpriced_tokens BIGINT NOT NULL,
    PRIMARY KEY (hour, project_id, agent_id, model, slot)
) WITHOUT ROWID;
INSERT INTO "usage_rows" VALUES(1794985200,'evals','a','','',2,2,0,200,200000,200,200000,0);
CREATE TABLE usage_totals (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    project_id TEXT NOT NULL,
    model TEXT NOT NULL,
    tokens BIGINT NOT NULL,
    micro_usd BIGINT NOT NULL,
    assumed_tokens BIGINT NOT NULL,
    assumed_micro_usd BIGINT NOT NULL,
    priced_micro_usd BIGINT NOT NULL,
    overruns BIGINT NOT NULL, unpriced_tokens BIGINT NOT NULL DEFAULT 0,
    UNIQUE (project_id, model)
);
INSERT INTO "usage_totals" VALUES(1,'evals','',200,200000,200,200000,0,0,0);
CREATE TABLE webhook_secrets (
    secret TEXT PRIMARY KEY,
    created_at DOUBLE PRECISION NOT NULL,
    ends_at DOUBLE PRECISION
) WITHOUT ROWID;
CREATE TABLE worker_tasks (
    node_id TEXT,
    task_id TEXT,
    PRIMARY KEY (node_id, task_id)
) WITHOUT ROWID;
CREATE TABLE workers (
    node_id TEXT PRIMARY KEY,
    agent_id TEXT NOT NULL,
    lease_seconds DOUBLE PRECISION NOT NULL,
    offered_until DOUBLE PRECISION NOT NULL
) WITHOUT ROWID;
CREATE INDEX ledger_leases ON ledger_reservations (lease_until) WHERE finished_at IS NULL;
CREATE INDEX ledger_kinds ON ledger_reservations (kind)
    WHERE finished_at IS NULL AND kind <> ''
    ;
CREATE INDEX live_tasks ON tasks (id) WHERE eviction_rank IS NULL;
CREATE INDEX ended_tasks ON tasks (eviction_rank, project_id, evictable_since)
    WHERE eviction_rank IS NOT NULL;
CREATE INDEX due_deliveries ON deliveries (due_at, host) WHERE due_at IS NOT NULL;
CREATE INDEX ended_deliveries ON deliveries (state, ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX old_submit_keys ON submit_keys (kept_at);
CREATE INDEX audit_log_by_share ON audit_log (share, seq);
CREATE INDEX slots_by_version ON slots (version);
CREATE INDEX calls_of_projects ON calls (project_id, id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('usage_totals',2);
COMMIT;

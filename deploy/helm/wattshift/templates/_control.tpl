{{- /*
The processes of the control plane: module or Celery queues, port, prefix of their settings, whose credential and user
in Valkey they have, and which other secrets. The same as in docker-compose.yml, which a test compares.
*/ -}}
{{- define "wattshift.processes" -}}
gateway: {module: gateway.app, port: 8000, as: gateway, valkey: true, public: true}
carbon: {module: carbon_service.app, port: 8010, as: carbon, database: true}
admission: {module: services.admission.app, port: 8020, as: admission, database: true, valkey: true, secrets: [WATTSHIFT_SERVICE_TOKEN, WATTSHIFT_SECRETS_KEY]}
scheduler: {module: services.scheduler.app, port: 8030, as: scheduler, database: true, valkey: true}
optimizer: {module: optimizer_service.app, port: 8040, as: optimizer, database: true, valkey: true}
worker: {tasks: optimizer_service.tasks, queues: "optimizer,lengths", as: optimizer, database: true, valkey: true}
plan-solver: {tasks: optimizer_service.tasks, queues: plan-solves, as: optimizer, database: true, valkey: true}
router: {module: services.router.app, port: 8050, as: router, valkey: true, public: true}
serving: {module: services.serving.app, port: 8090, as: serving, database: true, secrets: [WATTSHIFT_SECRETS_KEY]}
simulator: {module: services.simulator.app, port: 8080, as: simulator, database: true, valkey: true}
simulator-worker: {tasks: services.simulator.tasks, queues: "simulator,experiments", as: simulator, database: true, valkey: true}
telemetry: {module: services.telemetry.app, port: 8060, as: telemetry, database: true, valkey: true, public: true, secrets: [WATTSHIFT_NODE_JOIN_TOKEN, WATTSHIFT_SECRETS_KEY]}
{{- end }}

{{- define "wattshift.scheme" -}}
{{ ternary "https" "http" (not (empty .Values.control.tlsSecret)) }}
{{- end }}

{{- define "wattshift.secretEnvironment" -}}
- name: {{ .name }}
  valueFrom: {secretKeyRef: {name: {{ .secretName }}, key: {{ .key | default .name }}}}
{{- end }}

{{- define "wattshift.databaseEnvironment" -}}
{{- $password := .Values.control.database.password }}
{{ include "wattshift.secretEnvironment" (dict "name" "POSTGRES_PASSWORD" "secretName" ($password.secretName | default .Values.control.secretName) "key" $password.key) }}
- {name: DATABASE_URL, value: {{ printf "postgresql://%s:$(POSTGRES_PASSWORD)@%s" .Values.control.database.user (.Values.control.database.address | default (printf "%s:5432/wattshift" (include "wattshift.name" (dict "root" . "part" "postgres")))) | quote }}}
{{- end }}

{{- /* What each process of the control plane is told of the others; telemetry's address is told to agents, too. */ -}}
{{- define "wattshift.controlEnvironment" -}}
{{- $root := . }}
{{- range $name, $process := include "wattshift.processes" . | fromYaml }}
{{- if $process.port }}
- {name: WATTSHIFT_{{ upper $name }}_URL, value: {{ printf "%s://%s:%v" (include "wattshift.scheme" $root) (include "wattshift.name" (dict "root" $root "part" $name)) $process.port | quote }}}
{{- end }}
{{- end }}
{{- if .Values.control.tlsSecret }}
- {name: WATTSHIFT_TLS_CERT, value: /etc/wattshift/tls/tls.crt}
- {name: WATTSHIFT_TLS_KEY, value: /etc/wattshift/tls/tls.key}
- {name: WATTSHIFT_TLS_CA, value: /etc/wattshift/tls/ca.crt}
{{- end }}
{{- include "wattshift.settings" .Values.control.settings }}
{{- end }}

{{- define "wattshift.spread" -}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "wattshift.selector" . | nindent 14 }}
{{- end }}

{{- define "gw.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end }}
{{- define "gw.image" -}}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{- end }}
{{- define "gw.discovered" -}}{{ .Values.discovery.namespace | default .Release.Namespace }}{{- end }}
{{- define "gw.labels" -}}
app.kubernetes.io/name: trio-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "gw.selector" -}}
{{ include "gw.labels" . }}
app.kubernetes.io/component: gateway
{{- end }}
{{- define "gw.meta" -}}
{{ include "gw.labels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "gw.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
{{- define "gw.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}
{{- define "gw.agentScheme" -}}{{ if .Values.agent.tls.secretName }}https{{ else }}http{{ end }}{{- end }}
{{- define "gw.toml" -}}
{{- $known := or (contains "[[tenants]]" .Values.config) .Values.database.name .Values.allowAnonymous -}}
{{- if not $known }}{{ fail "nobody could be served: give config a [[tenants]], name a Secret in database, or set allowAnonymous" }}{{ end -}}
{{- if and .Values.engines (not .Values.agent.secretName) }}{{ fail "engines need agent.secretName, a Secret with the key secret, which gateway and agents share" }}{{ end -}}
[server]
bind = ["0.0.0.0:8080"]
{{- if gt (int .Values.processes) 1 }}
processes = {{ int .Values.processes }}
capacity = {{ .Values.capacity | quote }}
{{- end }}
{{- if .Values.tls.secretName }}
tls = {certificate = "tls/tls.crt", key = "tls/tls.key"}
{{- end }}
{{- if .Values.allowAnonymous }}
allow_anonymous = true
{{- end }}

[admin]
{{- if .Values.admin.tokens }}
bind = ["0.0.0.0:{{ int .Values.admin.port }}"]
hosts = ["{{ include "gw.name" . }}-admin", "{{ include "gw.name" . }}-admin.{{ .Release.Namespace }}.svc"]
tokens = [
{{- range .Values.admin.tokens }}
  {id = {{ .id | quote }}, hash = {{ .hash | quote }}, role = {{ .role | quote }}},
{{- end }}
]
{{- else }}
bind = ["127.0.0.1:{{ int .Values.admin.port }}"]
{{- end }}

[kubernetes]
namespace = {{ include "gw.discovered" . | quote }}

[shutdown]
readiness_delay = {{ int .Values.shutdown.readinessDelay }}
grace = {{ int .Values.shutdown.grace }}
hard_limit = {{ int .Values.shutdown.hardLimit }}
{{- range .Values.engines }}

[[workers]]
id = {{ .name | quote }}
url = "{{ include "gw.agentScheme" $ }}://{{ include "gw.name" $ }}-engines:{{ int $.Values.agent.port }}"
kind = "agent"
slots = {{ int .slots }}
pods = "app.kubernetes.io/instance={{ $.Release.Name }},app.kubernetes.io/component=engine-{{ .name }}"
api_key_file = "agent/secret"
{{- if $.Values.agent.tls.secretName }}
certificate = "agent-tls/tls.crt"
key = "agent-tls/tls.key"
ca = "agent-tls/ca.crt"
{{- end }}

[[models]]
id = {{ .model.id | quote }}
{{- if .model.upstream }}
upstream = {{ .model.upstream | quote }}
{{- end }}
workers = [{{ .name | quote }}]
{{- end }}
{{- with .Values.config }}

{{ . | trim }}
{{- end }}
{{- end }}

{{- define "wattshift.name" -}}
{{- printf "%s-%s" .root.Release.Name .part | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{- define "wattshift.selector" -}}
app.kubernetes.io/name: wattshift
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "wattshift.labels" -}}
{{ include "wattshift.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "wattshift.image" -}}
image: {{ printf "%s%s" .image.repository (ternary (printf ":%s" (.image.tag | default .root.Chart.AppVersion)) (printf "@%s" .image.digest) (empty .image.digest)) | quote }}
imagePullPolicy: {{ .image.pullPolicy }}
{{- end }}

{{- define "wattshift.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "wattshift.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "wattshift.telemetryUrl" -}}
{{- if .Values.controlPlane.telemetryUrl -}}
{{ .Values.controlPlane.telemetryUrl }}
{{- else if .Values.control.enabled -}}
{{ printf "%s://%s:8060" (include "wattshift.scheme" .) (include "wattshift.name" (dict "root" . "part" "telemetry")) }}
{{- else -}}
{{ fail "controlPlane.telemetryUrl says where the control plane is; or control.enabled has it in this chart" }}
{{- end -}}
{{- end }}

{{- /* What every process beside the control plane is told of the control plane. */ -}}
{{- define "wattshift.environment" -}}
- {name: WATTSHIFT_TELEMETRY_URL, value: {{ include "wattshift.telemetryUrl" . | quote }}}
{{- with .Values.controlPlane.redisUrl }}
- {name: REDIS_URL, value: {{ . | quote }}}
{{- end }}
{{- if .Values.controlPlane.tlsSecret }}
- {name: WATTSHIFT_TLS_CA, value: /etc/wattshift/tls/ca.crt}
{{- if .Values.controlPlane.showCertificate }}
- {name: WATTSHIFT_TLS_CERT, value: /etc/wattshift/tls/tls.crt}
- {name: WATTSHIFT_TLS_KEY, value: /etc/wattshift/tls/tls.key}
{{- end }}
{{- end }}
{{- end }}

{{- define "wattshift.settings" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "wattshift.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.controlPlane.tlsSecret }}
- {name: tls, mountPath: /etc/wattshift/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "wattshift.volumes" -}}
- {name: tmp, emptyDir: {sizeLimit: 64Mi}}
{{- with .Values.controlPlane.tlsSecret }}
- {name: tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{- define "wattshift.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end }}

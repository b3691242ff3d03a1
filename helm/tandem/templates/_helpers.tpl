{{- define "tandem.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "tandem.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "tandem.labels" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tandem.redisUrl" -}}
{{ .Values.redis.url | default (printf "redis://%s-redis:6379" (include "tandem.name" .)) }}
{{- end }}

{{- define "tandem.env" -}}
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
- name: POD_NAME
  valueFrom: { fieldRef: { fieldPath: metadata.name } }
- name: TANDEM_DIRECTORY__REDIS_URL
  value: {{ include "tandem.redisUrl" . | quote }}
- name: TANDEM_CACHE
  value: /cache
{{- with .Values.otlpEndpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end }}

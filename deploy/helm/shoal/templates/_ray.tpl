{{/* Variables of every Ray container, each once: the user's own say last what they are. */}}
{{- define "shoal.rayEnvironment" -}}
{{- $all := dict "HOME" "/home/shoal" "RAY_USAGE_STATS_ENABLED" "0" -}}
{{- /* Ray kills what has not saved after 30 s unless it is told how long Kubernetes waits; it needs some seconds to end. */ -}}
{{- $_ := set $all "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" (max 1 (sub (int64 .Values.terminationGracePeriodSeconds) 15)) -}}
{{- if .Values.mlflow.enabled }}{{ $_ := set $all "MLFLOW_TRACKING_URI" (printf "http://%s-mlflow:5000" .Release.Name) }}{{ end -}}
{{- if .Values.storage.s3.enabled -}}
{{- with .Values.storage.s3.region }}{{ $_ := set $all "AWS_REGION" . }}{{ end -}}
{{- with .Values.storage.s3.endpoint }}{{ $_ := set $all "AWS_ENDPOINT_URL_S3" . }}{{ end -}}
{{- end -}}
{{- $all = merge (dict) .Values.environment .Values.nccl.environment $all -}}
{{- range $name := keys $all | sortAlpha }}
- name: {{ $name | quote }}
  value: {{ include "shoal.text" (get $all $name) | quote }}
{{- end }}
{{- end }}

{{- define "shoal.rayEnvironmentFrom" -}}
{{- $from := .Values.environmentFrom }}
{{- if .Values.job.enabled }}{{ $from = concat $from .Values.job.environmentFrom }}{{ end }}
{{- if and .Values.storage.s3.enabled .Values.storage.s3.existingSecret }}
{{- $from = append $from (dict "secretRef" (dict "name" .Values.storage.s3.existingSecret)) }}
{{- end }}
{{- with $from }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "shoal.rayMounts" -}}
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/shoal
- name: shm
  mountPath: /dev/shm
{{- if .Values.storage.runs.enabled }}
- name: runs
  mountPath: {{ .Values.storage.runs.mountPath | quote }}
{{- end }}
{{- if .Values.storage.datasets.enabled }}
- name: datasets
  mountPath: {{ .Values.storage.datasets.mountPath | quote }}
  readOnly: true
{{- end }}
{{- if .Values.job.enabled }}
- name: job
  mountPath: /etc/shoal/job
  readOnly: true
{{- end }}
{{- end }}

{{/* (dict "root" $ "shm" "4Gi") */}}
{{- define "shoal.rayVolumes" -}}
{{- $ := .root -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ $.Values.storage.scratch }}
- name: home
  emptyDir:
    sizeLimit: {{ $.Values.storage.home }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .shm }}
{{- if $.Values.storage.runs.enabled }}
- name: runs
  persistentVolumeClaim:
    claimName: {{ include "shoal.runsClaim" $ }}
{{- end }}
{{- if $.Values.storage.datasets.enabled }}
- name: datasets
  persistentVolumeClaim:
    claimName: {{ include "shoal.datasetsClaim" $ }}
    readOnly: true
{{- end }}
{{- if $.Values.job.enabled }}
- name: job
  configMap:
    name: {{ $.Values.job.name | quote }}
    # It goes with the job; KubeRay's pod that clears Redis is made from this one, and must not wait for it.
    optional: true
{{- end }}
{{- end }}

{{/* The pod of a head or a worker: (dict "root" $ "group" GROUP "name" NAME "head" BOOL). */}}
{{- define "shoal.rayPod" -}}
{{- $ := .root -}}
{{- $group := .group -}}
metadata:
  labels:
    {{- include "shoal.rayLabels" (list $ .name) | nindent 4 }}
  {{- with $group.annotations }}
  annotations:
    {{- include "shoal.texts" . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ $.Release.Name }}-{{ ternary "head" "worker" .head }}
  # For the autoscaler alone.
  automountServiceAccountToken: {{ and .head (eq (include "shoal.scales" $) "true") }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ int64 $.Values.terminationGracePeriodSeconds }}
  securityContext:
    {{- include "shoal.podSecurity" (dict "user" 1000) | nindent 4 }}
  {{- with $.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with $group.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- include "shoal.texts" . | nindent 4 }}
  {{- end }}
  {{- $tolerations := $group.tolerations | default list }}
  {{- if $group.gpus }}
  {{- $tolerations = append $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}
  {{- end }}
  {{- if or .head $group.leads }}
  # What runs on a machine that is gone comes back elsewhere before KubeRay gives the job up.
  {{- range $key := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" }}
  {{- $tolerations = append $tolerations (dict "key" $key "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" 30) }}
  {{- end }}
  {{- end }}
  {{- with $tolerations | uniq }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $name := .name }}
  {{- with $group.spread }}
  topologySpreadConstraints:
    {{- range . }}
    - {{- toYaml . | nindent 6 }}
      labelSelector:
        matchLabels:
          app.kubernetes.io/instance: {{ $.Release.Name | quote }}
          shoal/group: {{ $name | quote }}
    {{- end }}
  {{- end }}
  containers:
    - name: ray-{{ ternary "head" "worker" .head }}
      image: {{ include "shoal.image" $ }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      {{- if .head }}
      ports:
        - name: gcs-server
          containerPort: 6379
        - name: dashboard
          containerPort: 8265
        - name: client
          containerPort: 10001
        - name: metrics
          containerPort: 8080
      {{- else }}
      ports:
        - name: metrics
          containerPort: 8080
      {{- end }}
      env:
        {{- include "shoal.rayEnvironment" $ | trim | nindent 8 }}
      {{- with include "shoal.rayEnvironmentFrom" $ | trim }}{{ . | nindent 6 }}{{ end }}
      {{- $amounts := dict "cpu" (include "shoal.text" $group.cpu) "memory" $group.memory }}
      {{- range $resource, $amount := $group.resources }}{{ $_ := set $amounts $resource (include "shoal.text" $amount) }}{{ end }}
      {{- if $group.gpus }}{{ $_ := set $amounts "nvidia.com/gpu" (include "shoal.text" $group.gpus) }}{{ end }}
      resources:
        requests:
          {{- toYaml $amounts | nindent 10 }}
        limits:
          {{- toYaml $amounts | nindent 10 }}
      securityContext:
        {{- include "shoal.containerSecurity" $ | nindent 8 }}
      volumeMounts:
        {{- include "shoal.rayMounts" $ | nindent 8 }}
      # As KubeRay would ask, said here so that it can be seen: the agent of this node, which knows its raylet (and on
      # the head the GCS). Patient, because a GCS that is slow is no reason to lose it.
      {{- range $probe, $failures := dict "readinessProbe" 10 "livenessProbe" 120 }}
      {{ $probe }}:
        httpGet:
          path: /api/healthz
          port: 52365
        initialDelaySeconds: {{ ternary 10 30 (eq $probe "readinessProbe") }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ $failures }}
      {{- end }}
  volumes:
    {{- include "shoal.rayVolumes" (dict "root" $ "shm" ($group.shm | default "1Gi")) | nindent 4 }}
{{- end }}

{{/* "true" where there is something to scale, and nobody else (Kueue) who counts the pods. */}}
{{- define "shoal.scales" -}}
{{- $differ := false -}}
{{- range $name, $group := .Values.workers -}}
{{- if and $group (lt (int $group.minReplicas) (int $group.maxReplicas)) }}{{ $differ = true }}{{ end -}}
{{- end -}}
{{- if and .Values.autoscaler.enabled $differ (not (and .Values.job.enabled .Values.job.queue)) }}true{{ end -}}
{{- end }}

{{/* "true" where a group leads jobs. */}}
{{- define "shoal.leads" -}}
{{- $leads := false -}}
{{- range $name, $group := .Values.workers }}{{ if and $group $group.leads (int $group.minReplicas) }}{{ $leads = true }}{{ end }}{{ end -}}
{{- if $leads }}true{{ end -}}
{{- end }}

{{/* The spec of a RayCluster, of a standing one and of a job's. */}}
{{- define "shoal.clusterSpec" -}}
{{- $scales := eq (include "shoal.scales" .) "true" -}}
rayVersion: {{ .Values.rayVersion | quote }}
authOptions:
  mode: token
  {{- with .Values.auth.existingSecret }}
  secretName: {{ . | quote }}
  {{- end }}
{{- if .Values.tls.enabled }}
tlsOptions:
  enabled: true
{{- end }}
{{- if .Values.gcsFaultTolerance.enabled }}
gcsFaultToleranceOptions:
  redisAddress: {{ .Values.gcsFaultTolerance.redisAddress | default (printf "%s-redis:6379" .Release.Name) | quote }}
  redisPassword:
    valueFrom:
      secretKeyRef:
        name: {{ .Values.gcsFaultTolerance.passwordSecret | quote }}
        key: password
{{- end }}
enableInTreeAutoscaling: {{ $scales }}
{{- if $scales }}
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ int64 .Values.autoscaler.idleTimeoutSeconds }}
  resources:
    {{- include "shoal.resources" .Values.autoscaler | nindent 4 }}
  securityContext:
    {{- include "shoal.containerSecurity" . | nindent 4 }}
  env:
    - name: HOME
      value: /home/shoal
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: home
      mountPath: /home/shoal
{{- end }}
headGroupSpec:
  serviceType: ClusterIP
  rayStartParams:
    # No training work: workers come and go, and the head must stay.
    num-cpus: "0"
    dashboard-host: 0.0.0.0
    # Half of /dev/shm.
    object-store-memory: {{ div (mul (include "shoal.mebi" .Values.head.shm) 1048576) 2 | quote }}
  template:
    {{- include "shoal.rayPod" (dict "root" . "group" .Values.head "name" "head" "head" true) | nindent 4 }}
workerGroupSpecs:
  {{- range $name, $group := .Values.workers }}
  {{- if $group }}
  - groupName: {{ $name | quote }}
    replicas: {{ max (int $group.minReplicas) (min (int ($group.replicas | default 0)) (int $group.maxReplicas)) }}
    minReplicas: {{ int64 $group.minReplicas }}
    maxReplicas: {{ int64 $group.maxReplicas }}
    {{- if $group.leads }}
    # Ray puts the jobs' own processes here, and no training.
    resources:
      CPU: "0"
      drivers: "1000"
    {{- end }}
    rayStartParams:
      # Ray's store has half of /dev/shm; data loader processes have the rest.
      object-store-memory: {{ div (mul (include "shoal.mebi" ($group.shm | default "1Gi")) 1048576) 2 | quote }}
    template:
      {{- include "shoal.rayPod" (dict "root" $ "group" $group "name" $name "head" false) | nindent 6 }}
  {{- end }}
  {{- end }}
{{- end }}
